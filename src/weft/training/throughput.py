"""How much of a GPU's arithmetic a run uses: model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""

import torch

from weft.explain.devices import device_called


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second of a GPU that is known."""
    known = device_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.bf16


def device_use(flops_per_token: float, tokens_per_second: float, device: torch.device) -> dict[str, float]:
    """How much of a GPU a run uses: `mfu`, the share of its peak, where that is known, and `memory`, peak bytes."""
    use: dict[str, float] = {}
    peak = peak_flops(device)
    if peak is not None:
        use["mfu"] = flops_per_token * tokens_per_second / peak
    if device.type == "cuda":
        use["memory"] = torch.cuda.max_memory_allocated(device)
    return use


def device_name(device: torch.device) -> str:
    """As a person would call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"
