"""One process that trains: its device, what that is called and how much of it is used.

Ctrl-C and SIGTERM: the step is finished and saved before the run stops.
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


@dataclass(frozen=True)
class Worker:
    """A process's device, its rank among the others, and where its messages go; a quiet one shows no progress."""

    device: torch.device = field(default_factory=pick_device)
    ranks: Ranks = ALONE
    log: Log = log_to_stderr
    quiet: bool = False


def device_use(flops_per_token: float, tokens_per_second: float, device: torch.device) -> dict[str, float]:
    """How much of a GPU a run uses: `memory`, peak bytes, and where its peak is known, `mfu`, the share of that (model
    FLOPs utilisation; Chowdhery et al. 2022, appendix B)."""
    if device.type != "cuda":
        return {}
    known = device_called(torch.cuda.get_device_name(device))
    mfu = {} if known is None else {"mfu": flops_per_token * tokens_per_second / known.bf16}
    return {**mfu, "memory": torch.cuda.max_memory_allocated(device)}


def device_name(device: torch.device) -> str:
    gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if gpu else counted(torch.get_num_threads(), "CPU thread")


PASSED_ON = 2.0  # seconds within which torchrun hands on the Ctrl-C that a terminal gave to every process anyway


@dataclass
class Interrupted:
    """Whether someone asked the run to stop, and by which signal."""

    signal: int | None = None  # for which the run stops
    received: int | None = None  # by this process

    def __bool__(self) -> bool:
        return self.signal is not None

    def agree(self, ranks: Ranks) -> None:
        """Several processes stop together, where all ask at the same step, whichever of them was interrupted."""
        self.signal = ranks.most(self.received or 0) or None


@contextmanager
def interruptions(log: Log, ranks: Ranks = ALONE) -> Iterator[Interrupted]:
    """The first Ctrl-C or SIGTERM is noted, for the loop to stop after the step; the second one ends at once. One of
    several processes waits until all agree."""
    asked, when = Interrupted(), 0.0
    if threading.current_thread() is not threading.main_thread():  # only the main thread may take signals
        yield asked
        return

    def note(number: int, frame: object) -> None:
        nonlocal when
        if asked.received is not None:
            if not ranks.alone and time.monotonic() - when < PASSED_ON:
                return
            raise KeyboardInterrupt
        asked.received, when = number, time.monotonic()
        if ranks.alone:
            asked.signal = number
        # torchrun sends SIGTERM when a process is lost: there is no step left
        if ranks.alone or number == signal.SIGINT:
            log("stopping after this step; once more to stop at once, without saving")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
