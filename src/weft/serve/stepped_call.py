"""A call that takes turns: its function runs in a thread of its own, but only while the model's thread waits for it."""

import threading
import time
from collections.abc import Callable
from typing import Any

from weft.progress import pausing
from weft.serve.errors import RefusedError

STEP_SECONDS = 0.02  # a step ends at the first `weft.progress.pause` after this time


class SteppedCall:
    """A function whose work is cut into steps at every `weft.progress.pause`. Only one thread runs at any time."""

    def __init__(self, function: Callable[[], Any]):
        self.function, self.cancelled, self.done = function, False, False
        self.result: Any = None
        self.error: BaseException | None = None
        self._go, self._paused, self._began = threading.Semaphore(0), threading.Semaphore(0), 0.0
        threading.Thread(target=self._run, name="weft call", daemon=True).start()

    def step(self) -> bool:
        """Run the function until its next pause, on behalf of the calling thread; return whether it has ended."""
        self._began = time.monotonic()
        self._go.release()
        self._paused.acquire()
        return self.done

    def cancel(self) -> None:
        """End the function at its pause."""
        self.cancelled = True
        while not self.done:
            self.step()

    def _run(self) -> None:
        self._go.acquire()
        try:
            with pausing(self._pause):
                self.result = None if self.cancelled else self.function()
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self.error = error
        self.done = True
        self._paused.release()

    def _pause(self) -> None:
        if time.monotonic() - self._began >= STEP_SECONDS:
            self._paused.release()
            self._go.acquire()
        if self.cancelled:
            raise RefusedError(499, "nobody waits for the result")
