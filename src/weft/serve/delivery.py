"""Delivery of outputs to the clients' event loops, throttled so that the model's thread keeps most of the time."""

import asyncio
import time
from collections import defaultdict

from weft.serve.tasks import Output, TextTask, call_in_loop

MODEL_TIME_RATIO = 4.0  # an event loop that needed t seconds for a delivery gets the next one after this many times t


class ThrottledDelivery:
    """Collects outputs on the model's thread and hands them over to event loops, several decode steps in one call.

    Python runs one thread at a time: with many streams, an event loop that woke up for every token would keep the
    model waiting.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[TextTask, Output]] = []
        self._in_progress, self._not_before = False, 0.0

    def add(self, task: TextTask, output: Output) -> None:
        self._pending.append((task, output))

    def flush(self, *, throttled: bool) -> None:
        """Hand over all pending outputs with one call per event loop; if `throttled`, only if the loops are ready."""
        if not self._pending or (throttled and (self._in_progress or time.monotonic() < self._not_before)):
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TextTask, Output]]] = defaultdict(list)
        for task, output in self._pending:
            by_loop[task.loop].append((task, output))
        self._pending = []
        for loop, outputs in by_loop.items():
            self._in_progress = True
            call_in_loop(loop, self._deliver, outputs, loop)

    def _deliver(self, outputs: list[tuple[TextTask, Output]], loop: asyncio.AbstractEventLoop) -> None:
        """Wake up the waiting clients, in their event loop, and time how long they keep it busy."""
        start = time.monotonic()
        for task, output in outputs:
            task.outputs.put_nowait((task.index, output))
        loop.call_soon(self._finish, start)

    def _finish(self, start: float) -> None:
        now = time.monotonic()
        self._not_before, self._in_progress = now + MODEL_TIME_RATIO * (now - start), False
