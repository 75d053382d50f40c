"""Who runs next: requests join the batch when there are free blocks and leave it when they end, token by token.

In each step all texts that are being written get a token, and new prompts are read a limited chunk at a time, so that
a long one holds nobody up (Yu et al. 2022; Agrawal et al. 2023: chunked prefill). Where free blocks run out, the
youngest request is preempted: its blocks go to the others, and it is read again later.
"""

import threading
from collections import deque
from dataclasses import dataclass

from weft.decode.engine.blocks import BlockManager
from weft.decode.engine.requests import Request
from weft.decode.engine.states import StateManager
from weft.errors import WeftError

Manager = BlockManager | StateManager  # what keeps and reads a model's requests
Work = list[tuple[Request, int]]  # how many tokens of which requests to read


@dataclass
class Counts:
    """What the engine has done so far, in tokens, requests and steps."""

    prompt: int = 0  # tokens of prompts that were read
    shared: int = 0  # tokens of prompts that need not be read: another text has the same prefix
    written: int = 0
    preempted: int = 0  # times that a request was preempted
    steps: int = 0


class Scheduler:
    """Requests that wait and requests that run, at most `rows` of them; `prefill` tokens of prompts are read a step.

    Any thread may add requests; one thread schedules.
    """

    def __init__(self, manager: Manager, rows: int, prefill: int, counts: Counts):
        self.manager, self.rows, self.prefill, self.counts = manager, rows, prefill, counts
        self.running: list[Request] = []  # in the order they were admitted
        self.waiting: deque[Request] = deque()
        self._lock = threading.Lock()  # guards the two lists
        self._added = threading.Condition(self._lock)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        with self._lock:
            self.waiting.append(request)
            self._added.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Sleep until there is a request, or for `timeout` seconds; True if there is one."""
        with self._added:
            return self._added.wait_for(lambda: bool(self.waiting or self.running), timeout)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        with self._lock:
            return len(self.waiting) + len(self.running)

    def schedule(self) -> Work | None:
        """Admit and preempt; then a token of each text that is being written, and chunks of the new prompts.

        None where free blocks have run out and some requests are ahead of the host: it has to catch up first, since
        some of them may have ended, and only one whose text is known can be read again later.
        """
        self._drop_cancelled()
        self._admit()
        return self._with_blocks(self._plan())

    def remove(self, request: Request) -> None:
        """A request has ended, and frees its blocks."""
        with self._lock:
            if request in self.running:
                self.running.remove(request)
                self.manager.release(request)

    def slide(self, request: Request) -> None:
        """The window of a request is full: its last ids are read again, as after a preemption."""
        self._return(request)
        request.slide()

    def _drop_cancelled(self) -> None:
        with self._lock:
            waiting = [request for request in self.waiting if request.cancelled]
            for request in waiting:
                self.waiting.remove(request)
            running = [request for request in self.running if request.cancelled]
        for request in running:
            self.remove(request)
        for request in waiting + running:
            request.end()

    def _admit(self) -> None:
        """Admit those that wait, in the order they came, as long as blocks are free."""
        later: list[Request] = []  # their prefix is being read just now
        try:
            while self.waiting and len(self.running) < self.rows:
                request = self.waiting[0]  # only this thread takes requests from the queue
                if self.manager.awaits(request):
                    later.append(self.waiting.popleft())
                elif not self._admit_one(request):
                    break
        finally:
            with self._lock:
                self.waiting.extendleft(reversed(later))

    def _admit_one(self, request: Request) -> bool:
        """Admit the first of those that wait; False where too few blocks are free."""
        try:
            # each of those that run may soon need a block more
            if not self.manager.admit(request, spare=len(self.running)):
                return False
        except WeftError as error:
            self.waiting.popleft()
            request.end(error)
            return True
        with self._lock:
            self.waiting.popleft()
            self.running.append(request)
        if not request.written:
            self.counts.shared += request.read
        return True

    def _plan(self) -> Work:
        work: Work = [(request, 1) for request in self.running if request.unread == 1 and not request.stays]
        new = [request for request in self.running if request.unread > 1]
        # the oldest goes first, then the shortest; while others wait, one gets half of the tokens at most
        new[1:] = sorted(new[1:], key=lambda request: request.unread)
        left = self.prefill
        for request in new:
            most = max(1, self.prefill // 2) if len(new) > 1 else left
            size = min(request.unread, left, most)
            work.append((request, size))
            left -= size
            if left == 0:
                break
        return work

    def _with_blocks(self, work: Work) -> Work | None:
        """The work that has blocks; where too few are free, the youngest requests are preempted."""
        preempted: set[int] = set()
        for request, size in sorted(work, key=lambda item: item[0].number):
            while request.number not in preempted and not self.manager.extend(request, request.read + size):
                if any(other.ahead for other in self.running):
                    return None
                youngest = max(self.running, key=lambda other: other.number)
                preempted.add(youngest.number)
                self._preempt(youngest)
        return [item for item in work if item[0].number not in preempted] if preempted else work

    def _preempt(self, request: Request) -> None:
        """Give its blocks to the others."""
        self._return(request)
        self.counts.preempted += 1

    def _return(self, request: Request) -> None:
        """Free its blocks, and let it wait again before those that came later."""
        self.remove(request)
        with self._lock:
            later = (place for place, other in enumerate(self.waiting) if other.number > request.number)
            self.waiting.insert(next(later, len(self.waiting)), request)
