"""How much of a GPU's arithmetic a run uses: model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""

import torch

from weft.models.base import LanguageModel
from weft.models.config import TransformerConfig

# dense bf16 products, TFLOP/s, from the makers' data sheets
PEAKS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121, "A10": 125, "V100": 125}


def flops_per_token(model: LanguageModel, length: int) -> float:
    """FLOPs of forward and backward a token: 6 a weight that multiplies, 12 · layers · d_model · time for attention.

    Tables that are only looked up don't multiply; a tied one does, as the head.
    """
    settings = model.config
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.dim() >= 2]
    weights = sum(size for name, size in matrices if "position" not in name)
    tied = getattr(getattr(settings, "head", settings), "tied", False)
    looked_up = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    weights -= sum(looked_up) - (max(looked_up, default=0) if tied else 0)
    attention = 0
    if isinstance(settings, TransformerConfig):
        attention = 12 * settings.layers * settings.attention.heads * settings.d_head * length
    return 6.0 * weights + attention


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for key, peak in PEAKS.items() if key in name), None)


def device_use(model: LanguageModel, length: int, tokens_per_second: float, device: torch.device) -> dict[str, float]:
    """How much of a GPU a run uses: `mfu`, the share of its peak, where that is known, and `memory`, peak bytes."""
    use: dict[str, float] = {}
    peak = peak_flops(device)
    if peak is not None:
        use["mfu"] = flops_per_token(model, length) * tokens_per_second / peak
    if device.type == "cuda":
        use["memory"] = torch.cuda.max_memory_allocated(device)
    return use


def device_name(device: torch.device) -> str:
    """As a person would call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"
