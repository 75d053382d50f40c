"""Many texts at once, with one model.

    engine = Engine(model, vocab_size, Limits())
    requests = [engine.submit(prompt, settings, seed) for prompt, seed in zip(prompts, seeds)]
    while engine.step():
        pass
    texts = [request.completion().text for request in requests]

What a request gets depends on its prompt, its settings and its seed alone, whatever else is written meanwhile.

On a GPU the engine runs one step ahead of the host: tokens are chosen on the device, the next step reads them there,
and the host sees them while that step runs. A text that has ended by then has one token too many, which is dropped. Its
blocks go to others only in steps that the device does later, so nothing is written into them behind anybody's back.
Where a token can be chosen only by what the host knows, as under a grammar, such a step waits for the host.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager, Limits, Request, Work
from weft.decode.prompt import Prompt, context_window
from weft.decode.sampling import choose_tokens, fetch_tokens, invalid_logits_error, mark_invalid, on_device
from weft.decode.text import Chunk, adjust_logits, extend_texts
from weft.errors import ModelError, WeftError, out_of_memory
from weft.models.transformer import Transformer

PREFILL, PREFILL_ON_CUDA = 512, 2048  # products of fewer rows leave a large GPU idle in part


@dataclass
class Counts:
    """What the engine has done so far, in tokens, requests and steps."""

    prompt: int = 0  # tokens of prompts that were read
    shared: int = 0  # tokens of prompts that need not be read: another text has the same prefix
    written: int = 0
    preempted: int = 0  # times that a request was preempted
    steps: int = 0


class Scheduler:
    """Who runs next: requests join the batch when there are free blocks and leave it when they end, token by token.

    In each step all texts that are being written get a token, and new prompts are read at most `prefill` tokens at a
    time, so that a long one holds nobody up (Yu et al. 2022; Agrawal et al. 2023: chunked prefill). At most `rows` run.
    Where free blocks run out, the youngest request is preempted: its blocks go to the others, and it is read again
    later.
    """

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
        work: Work = [(request, 1) for request in self.running if request.unread == 1 and not request.ends_or_slides]
        new = [request for request in self.running if request.unread > 1]
        # the oldest goes first, then the shortest; while others wait, one gets half of the tokens at most
        new[1:] = sorted(new[1:], key=lambda request: request.unread)
        left = self.prefill
        for request in new:
            size = min(request.unread, left, max(1, self.prefill // 2) if len(new) > 1 else left)
            work.append((request, size))
            left -= size
            if left == 0:
                break
        return self._with_blocks(work)

    def remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.manager.release(request)

    def slide(self, request: Request) -> None:
        """The window of a request is full: its last ids are read again, as after a preemption."""
        self.requeue(request)
        request.slide()

    def _admit(self) -> None:
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

    def _with_blocks(self, work: Work) -> Work | None:
        """The work that has blocks; where too few are free, the youngest requests are preempted."""
        preempted: set[int] = set()
        for request, size in sorted(work, key=lambda item: item[0].number):
            while request.number not in preempted and not self.manager.extend(request, request.read + size):
                if any(other.ahead for other in self.running):
                    return None
                youngest = max(self.running, key=lambda other: other.number)
                preempted.add(youngest.number)
                self.requeue(youngest)
                self.counts.preempted += 1
        return [item for item in work if item[0].number not in preempted] if preempted else work

    def requeue(self, request: Request) -> None:
        """Free its blocks, and let it wait again before those that came later."""
        self.remove(request)
        later = (place for place, other in enumerate(self.waiting) if other.number > request.number)
        self.waiting.insert(next(later, len(self.waiting)), request)


Late = tuple[list[Request], Callable[[], list[int]]]  # requests, and the function that waits for a token of each


class Engine:
    """Writes many texts with one decoder, of tokens below `vocab_size`."""

    def __init__(self, model: Transformer, vocab_size: int, limits: Limits):
        self.model, self.vocab_size = model, vocab_size
        self.device, self.window = model.embedding.weight.device, context_window(model)
        self.manager = BlockManager(model, limits)
        self.counts = Counts()
        prefill = limits.prefill or (PREFILL_ON_CUDA if self.device.type == "cuda" else PREFILL)
        self.scheduler = Scheduler(self.manager, limits.rows, prefill, self.counts)
        self._numbers = count(1)  # of requests, in the order they come
        self._late: Late | None = None  # what was written in the last step, where the host hasn't seen it yet

    def submit(self, prompt: Prompt, settings: Sampling, seed: int) -> Request:
        """Ask for a text that continues a prompt that was checked."""
        request = Request(next(self._numbers), prompt, settings, self.window, seed)
        pool, blocks = self.manager.pool, self.manager.store.blocks
        if pool.blocks_for(request.longest) > blocks:
            raise ModelError(
                f"prompt and text are {request.longest} tokens, but there is memory for {blocks * pool.block_size}"
            )
        self.scheduler.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Nobody waits for this text any more: others may have its blocks from the next step on."""
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        self._end(request)

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> bool:
        """Read a token of each text that is being written and a chunk of the new prompts; False if idle."""
        work = self.scheduler.schedule()
        if work is None:
            self._catch_up()
            work = self.scheduler.schedule()
        assert work is not None, "nothing is ahead now"
        self.counts.steps += bool(work)
        involved = [request for request, _ in work] + ([] if self._late is None else self._late[0])
        try:
            if work:
                self._step(work)
            else:
                self._catch_up()
        except BaseException as error:
            if work and out_of_memory(error):
                self._make_room(work, error)
                return not self.idle
            failed = error if isinstance(error, WeftError) else ModelError(f"the engine failed: {error}")
            for request in involved:
                self._end(request, failed)
            if not isinstance(error, WeftError):
                raise
        return not self.idle

    def _make_room(self, work: Work, error: BaseException) -> None:
        """Memory ran out in a step: the request that had most to read ends, and the others are read again."""
        self._catch_up()
        going = sorted((item for item in work if not item[0].ended), key=lambda item: item[1])
        failed = ModelError("not enough memory to read this text beside the others")
        failed.__cause__ = error
        for place, (request, _) in enumerate(going, start=1):
            if place == len(going):
                self._end(request, failed)
            else:
                self.scheduler.requeue(request)

    def _step(self, work: Work) -> None:
        features = self.manager.read(work)
        self.counts.prompt += sum(size for request, size in work if not request.written and not request.ahead)
        all_read = [place for place, (request, _) in enumerate(work) if not request.unread]
        if not all_read:
            self._catch_up()
            return
        requests, features = _those([request for request, _ in work], features, all_read)
        logits = self.manager.head(features)[:, : self.vocab_size]
        if self.manager.graphs is not None and not any(request.needs_host for request in requests):
            self._run_ahead(requests, logits)
            return
        self._catch_up()
        going_on = [place for place, request in enumerate(requests) if not request.ended]
        if going_on:
            self._write(*_those(requests, logits, going_on))

    def _run_ahead(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each request from logits (requests, V) on the device; then see to the last step's."""
        logits, settings = logits.float(), [request.settings for request in requests]
        uniforms = [0.0 if request.settings.greedy else request.uniform() for request in requests]
        tokens = mark_invalid(choose_tokens(logits, settings, uniforms), logits)
        self.manager.keep(requests, tokens.clamp(min=0))
        late = requests, fetch_tokens(tokens)
        for request in requests:
            request.ahead += 1
        self._catch_up()
        self._late = late

    def _catch_up(self) -> None:
        if self._late is None:
            return
        (requests, arrived), self._late = self._late, None
        for request, token in zip(requests, arrived(), strict=True):
            request.ahead -= 1
            if request.ended:
                continue  # it had ended before: one token too many
            if token < 0:
                self._end(request, invalid_logits_error(token))
            else:
                self.counts.written += 1
                self._hand_on(request, request.push(token))

    def _write(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each request from logits (requests, V), and hand on what it adds."""
        try:
            ready = adjust_logits(requests, logits)
        except ModelError as error:
            if len(requests) == 1:
                self._end(requests[0], error)
            else:  # of one of them: the others are none the worse for it
                for row, request in enumerate(requests):
                    self._write([request], logits[row : row + 1])
            return
        self.counts.written += len(requests)
        chunks = extend_texts(requests, logits, ready, agree=self.model.agree)
        for request, chunk in zip(requests, chunks, strict=True):
            self._hand_on(request, chunk)

    def _hand_on(self, request: Request, chunk: Chunk) -> None:
        request.chunks.append(chunk)
        if chunk.finish is not None:
            self._end(request)
        elif request.full:
            self.scheduler.slide(request)

    def _end(self, request: Request, error: WeftError | None = None) -> None:
        if not request.ended:
            self.scheduler.remove(request)
            request.ended, request.error = True, error


def _those(requests: list[Request], rows: Tensor, places: list[int]) -> tuple[list[Request], Tensor]:
    if len(places) == len(requests):
        return requests, rows
    return [requests[place] for place in places], rows.index_select(0, on_device(torch.tensor(places), rows.device))
