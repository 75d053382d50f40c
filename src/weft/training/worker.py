"""One process that trains."""

from dataclasses import dataclass, field

import torch

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
