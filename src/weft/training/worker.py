"""One process that trains: its device, the use it makes of it, and interruptions.

On Ctrl-C or SIGTERM the step is finished and saved before the run stops.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weft.costs.devices import device_called
from weft.errors import counted
from weft.machine import pick_device
from weft.parallel.ranks import ALONE, Ranks
from weft.progress import Log, log_to_stderr

RELAY_SECONDS = 2.0  # within which torchrun may relay a Ctrl-C that the terminal has already sent to every process


@dataclass(frozen=True)
class TrainingWorker:
    """A process's device, its rank, and where its messages go; a quiet one shows no progress."""

    device: torch.device = field(default_factory=pick_device)
    ranks: Ranks = ALONE
    log: Log = log_to_stderr
    quiet: bool = False


def device_use(flops_per_token: float, tokens_per_second: float, device: torch.device) -> dict[str, float]:
    """Return a GPU's peak `memory` in bytes, and model FLOPs utilisation, `mfu` (Chowdhery et al. 2022, appendix B)."""
    if device.type != "cuda":
        return {}
    known = device_called(torch.cuda.get_device_name(device))
    mfu = {} if known is None else {"mfu": flops_per_token * tokens_per_second / known.bf16}
    return {**mfu, "memory": torch.cuda.max_memory_allocated(device)}


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the number of CPU threads."""
    gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if gpu else counted(torch.get_num_threads(), "CPU thread")


@dataclass
class Interruption:
    """The signal that stops the run, once all ranks agree on it, and the one that this process received."""

    signal: int | None = None
    received: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def agree(self, ranks: Ranks) -> None:
        """Stop all ranks if any of them was interrupted; all call this at the same step."""
        self.signal = ranks.max(self.received or 0) or None


@contextmanager
def interruptions(log: Log, ranks: Ranks = ALONE, *, relay_seconds: float = RELAY_SECONDS) -> Iterator[Interruption]:
    """Record the first Ctrl-C or SIGTERM, for the loop to stop when all ranks agree; the second stops immediately."""
    interruption, when = Interruption(), 0.0
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interruption
        return

    def handle(number: int, frame: object) -> None:
        nonlocal when
        if interruption.received is not None:
            if not ranks.alone and time.monotonic() - when < relay_seconds:
                return
            raise KeyboardInterrupt
        interruption.received, when = number, time.monotonic()
        if ranks.alone:
            interruption.signal = number
        # torchrun sends SIGTERM when a process is lost: no step will finish then
        if ranks.alone or number == signal.SIGINT:
            log("stopping after this step; once more to stop immediately, without saving")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
