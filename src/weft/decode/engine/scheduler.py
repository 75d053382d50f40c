"""Who runs next: requests join the batch when there are free blocks and leave it when they end, token by token.

In each step all texts that are being written get a token, and new prompts are read a limited chunk at a time, so that
a long one holds nobody up (Yu et al. 2022; Agrawal et al. 2023: chunked prefill). Where free blocks run out, the
youngest request is preempted: its blocks go to the others, and it is read again later.
"""

from collections import deque
from dataclasses import dataclass

from weft.decode.engine.blocks import BlockManager
from weft.decode.engine.requests import Request, Work


@dataclass
class Counts:
    """What the engine has done so far, in tokens, requests and steps."""

    prompt: int = 0  # tokens of prompts that were read
    shared: int = 0  # tokens of prompts that need not be read: another text has the same prefix
    written: int = 0
    preempted: int = 0  # times that a request was preempted
    steps: int = 0


class Scheduler:
    """Requests that wait and requests that run, at most `rows` of them; `prefill` tokens of prompts are read a step."""

    def __init__(self, manager: BlockManager, rows: int, prefill: int, counts: Counts):
        self.manager, self.rows, self.prefill, self.counts = manager, rows, prefill, counts
        self.running: list[Request] = []  # in the order they were admitted
        self.waiting: deque[Request] = deque()

    def schedule(self) -> Work | None:
        """Admit and preempt; then a token of each text that is being written, and chunks of the new prompts.

        None where free blocks have run out and some requests are ahead of the host: it has to catch up first, since
        some of them may have ended, and only one whose text is known can be read again later.
        """
        self._admit()
        return self._with_blocks(self._plan())

    def remove(self, request: Request) -> None:
        """A request has ended, and frees its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.manager.release(request)

    def slide(self, request: Request) -> None:
        """The window of a request is full: its last ids are read again, as after a preemption."""
        self._return(request)
        request.slide()

    def _admit(self) -> None:
        """Admit those that wait, in the order they came, as long as blocks are free."""
        later: list[Request] = []  # their prefix is being read just now
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            if self.manager.awaits(request):
                later.append(request)
            elif self.manager.admit(request, spare=len(self.running)):  # each that runs may soon need a block more
                self.running.append(request)
                self.counts.shared += 0 if request.written else request.read
            else:
                self.waiting.appendleft(request)
                break
        self.waiting.extendleft(reversed(later))

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
                self._return(youngest)
                self.counts.preempted += 1
        return [item for item in work if item[0].number not in preempted] if preempted else work

    def _return(self, request: Request) -> None:
        """Free its blocks, and let it wait again before those that came later."""
        self.remove(request)
        later = (place for place, other in enumerate(self.waiting) if other.number > request.number)
        self.waiting.insert(next(later, len(self.waiting)), request)
