"""A queue in which clients take turns, so that a client with many requests delays no other client."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weft.serve.config import Limits
from weft.serve.errors import RefusedError

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Bounded queue: first in, first out for one client, round-robin between clients. Not thread-safe, except `len`."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.arrivals = 0  # tasks queued since the start
        self._tasks: OrderedDict[str, deque[T]] = OrderedDict()  # the client served longest ago comes first

    def __len__(self) -> int:
        return sum(map(len, list(self._tasks.values())))

    def put(self, client: str, tasks: Sequence[T], *, running: int = 0) -> None:
        """Queue all of a client's tasks, or refuse all of them; `running` of its earlier tasks are in progress."""
        limits, waiting = self.limits, len(self)
        limit = min(limits.queue, limits.per_client)
        if len(tasks) > limit:
            raise RefusedError(400, f"{len(tasks)} texts in one request; this server accepts at most {limit}")
        unfinished = len(self._tasks.get(client, ())) + running
        retry_after = 1 + waiting // limits.rows
        if waiting + len(tasks) > limits.queue:
            raise RefusedError(429, f"{waiting} requests are already waiting", retry_after=retry_after)
        if unfinished + len(tasks) > limits.per_client:
            message = f"{unfinished} of your texts are already waiting or in progress"
            raise RefusedError(429, message, retry_after=retry_after)
        self._tasks.setdefault(client, deque()).extend(tasks)
        self.arrivals += len(tasks)

    def take(self, fits: Callable[[T], bool] = lambda task: True) -> T | None:
        """Remove and return the oldest task that fits, of the client that was served longest ago; None if none does."""
        for client, tasks in self._tasks.items():
            if (task := next(filter(fits, tasks), None)) is not None:
                tasks.remove(task)
                del self._tasks[client]
                if tasks:
                    self._tasks[client] = tasks
                return task
        return None

    def drop(self, unwanted: Callable[[T], bool] = lambda task: True) -> list[T]:
        """Remove and return all unwanted tasks."""
        dropped = [task for tasks in self._tasks.values() for task in tasks if unwanted(task)]
        for client, tasks in list(self._tasks.items()):
            if left := deque(task for task in tasks if not unwanted(task)):
                self._tasks[client] = left
            else:
                del self._tasks[client]
        return dropped
