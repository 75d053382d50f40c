"""Ctrl-C and SIGTERM: the step is finished and saved before the run stops."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.parallel.ranks import ALONE, Ranks
from weft.progress import Log

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
    """The first Ctrl-C or SIGTERM is noted, for the loop to stop after the step; the second one ends at once.

    One of several processes waits until all agree.
    """
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
        if (
            ranks.alone or number == signal.SIGINT
        ):  # torchrun sends SIGTERM when a process is lost: there is no step left
            log("stopping after this step; once more to stop at once, without saving")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
