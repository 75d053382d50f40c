"""One process that trains, and its device: what it is called, and how much of it is used."""

from dataclasses import dataclass, field

import torch

from weft.costs.devices import device_called
from weft.errors import counted
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import Log, log_to_stderr
from weft.training.precision import pick_device


@dataclass(frozen=True)
class Worker:
    """A process's device, its rank among the others, and where its messages go; a quiet one shows no progress."""

    device: torch.device = field(default_factory=pick_device)
    ranks: Ranks = ALONE
    log: Log = log_to_stderr
    quiet: bool = False


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second of a GPU that is known."""
    known = device_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.bf16


def device_use(flops_per_token: float, tokens_per_second: float, device: torch.device) -> dict[str, float]:
    """How much of a GPU a run uses: `memory`, peak bytes, and where its peak is known, `mfu`, the share of that (model
    FLOPs utilisation; Chowdhery et al. 2022, appendix B)."""
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
    return counted(torch.get_num_threads(), "CPU thread")
