"""Ctrl-C and SIGTERM: the step is finished and saved before the run stops."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Interrupted:
    """Whether someone asked the run to stop, and by which signal."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def interruptions(say: Callable[[str], None]) -> Iterator[Interrupted]:
    """The first Ctrl-C or SIGTERM is noted, for the loop to stop after the step; the second one ends at once."""
    asked = Interrupted()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may take signals
        yield asked
        return

    def note(number: int, frame: object) -> None:
        if asked.signal is not None:
            raise KeyboardInterrupt
        asked.signal = number
        say("stopping after this step; once more to stop at once, without saving")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
