"""Continuous batching: many texts with one model, which join and leave the batch token by token.

    engine = Engine(model, vocab_size, EngineLimits())
    requests = [engine.submit(prompt, settings, seed) for prompt, seed in zip(prompts, seeds)]
    while engine.step():
        pass
    texts = [request.completion().text for request in requests]

A request's text depends on its prompt, settings and seed alone, not on the other requests.

On a GPU the engine runs one step ahead of the host: tokens are chosen on the device, the next step reads them there,
and the host sees them while that step runs. A text that turns out to have ended has one token too many, which is
dropped. Its blocks are reused only by later steps of the device, so nothing overwrites them early. Where only the host
can choose a token, as under a grammar, the step waits for it.
"""

import random
import sys
from collections import deque
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager, EngineLimits, Request, Work
from weft.decode.prompt import Prompt, context_window
from weft.decode.sampling import TokenFetch, choose_tokens, invalid_logits_error, mark_invalid, on_device
from weft.decode.text import Chunk, adjust_logits, extend_texts
from weft.errors import ModelError, WeftError, out_of_memory
from weft.models.base import step_size
from weft.models.transformer import Transformer

WARM_UP_TOKENS = 4  # written by each text of a warm-up
WARM_UP_SAMPLING = (
    Sampling(max_tokens=WARM_UP_TOKENS, temperature=0.0),
    Sampling(max_tokens=WARM_UP_TOKENS, temperature=1.0, top_k=50, top_p=0.9),
)
PREFILL, PREFILL_ON_CUDA = 512, 2048  # prompt tokens per step by default; fewer leave part of a large GPU idle


@dataclass
class Counts:
    """Totals of an engine's work."""

    prompt: int = 0  # prompt tokens read
    shared: int = 0  # prompt tokens not read, because another text has the same prefix
    written: int = 0  # tokens
    preempted: int = 0  # preemptions of requests
    steps: int = 0


class Scheduler:
    """Chooses the work of each step: requests join the batch when there are free blocks, and leave it when they end.

    Each step reads one token of every running text, and at most `prefill` tokens of new prompts, so that a long prompt
    delays nobody (Yu et al. 2022; Agrawal et al. 2023: chunked prefill). At most `rows` requests run. If free blocks
    run out, the youngest request is preempted: the others get its blocks, and it is read again later.
    """

    def __init__(self, manager: BlockManager, counts: Counts, *, rows: int, prefill: int):
        self.manager, self.rows, self.prefill, self.counts = manager, rows, prefill, counts
        self.running: list[Request] = []  # in order of admission
        self.waiting: deque[Request] = deque()

    def schedule(self) -> Work | None:
        """Admit and preempt; then return one token of each running text and chunks of the new prompts.

        Return None if free blocks have run out while requests are ahead of the host. It has to catch up first: some may
        have ended, and only a request whose text is known can be preempted.
        """
        self._admit()
        work: Work = [(request, 1) for request in self.running if request.unread == 1 and not request.ends_or_slides]
        new = [request for request in self.running if request.unread > 1]
        # The oldest goes first, then the shortest; while others wait, each gets at most half of the tokens.
        new[1:] = sorted(new[1:], key=lambda request: request.unread)
        left = self.prefill
        for request in new:
            most = step_size(self.manager.model, self.prefill, request.read)
            size = min(request.unread, -(-most * left // self.prefill), max(1, most // 2) if len(new) > 1 else most)
            work.append((request, size))
            left -= size * self.prefill // most
            if left <= 0:
                break
        return self._with_blocks(work)

    def remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.manager.release(request)

    def requeue(self, request: Request) -> None:
        """Free a request's blocks, and let it wait before all later ones."""
        self.remove(request)
        later = (index for index, other in enumerate(self.waiting) if other.number > request.number)
        self.waiting.insert(next(later, len(self.waiting)), request)

    def _admit(self) -> None:
        deferred: list[Request] = []  # another request is reading their prefix
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            if self.manager.awaits(request):
                deferred.append(request)
            elif self.manager.admit(request, spare=len(self.running)):  # every running request may soon need a block
                self.running.append(request)
                self.counts.shared += 0 if request.written else request.read
            else:
                self.waiting.appendleft(request)
                break
        self.waiting.extendleft(reversed(deferred))

    def _with_blocks(self, work: Work) -> Work | None:
        """Allocate blocks for the work, preempting the youngest requests if there are too few; return what is left."""
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


PendingTokens = tuple[list[Request], TokenFetch]  # requests and their newest tokens


class Engine:
    """Generates many texts with one decoder, from tokens below `vocab_size`."""

    def __init__(self, model: Transformer, vocab_size: int, limits: EngineLimits):
        self.model, self.vocab_size = model, vocab_size
        self.device, self.window = model.embedding.weight.device, context_window(model)
        self.manager = BlockManager(model, limits)
        self.counts = Counts()
        prefill = limits.prefill or (PREFILL_ON_CUDA if self.device.type == "cuda" else PREFILL)
        self.scheduler = Scheduler(self.manager, self.counts, rows=limits.rows, prefill=prefill)
        self._numbers = count(1)  # of requests, in order of submission
        self._pending: PendingTokens | None = None  # tokens of the last step that the host has not seen

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs, if any, by texts that are dropped, so that no request waits."""
        if self.manager.graphs is None:
            return
        with torch.inference_mode():
            self.manager.graphs.capture_steps()
        room = min(self.manager.pool.block_size * (self.manager.store.blocks - 1), self.window or sys.maxsize)
        longest = min(self.scheduler.prefill, room - WARM_UP_TOKENS)
        batches = [[1 << power] for power in range(longest.bit_length())] + [[longest], [16] * self.scheduler.rows]
        rng = random.Random(0)
        for settings in WARM_UP_SAMPLING:
            for lengths in batches:
                for length in lengths:
                    self.submit(Prompt(rng.choices(range(self.vocab_size), k=length)), settings, 0)
                while self.step():
                    pass
        vars(self.counts).update(vars(Counts()))  # the scheduler holds the same object

    def submit(self, prompt: Prompt, settings: Sampling, seed: int) -> Request:
        """Request a continuation of a checked prompt."""
        request = Request(next(self._numbers), prompt, settings, window=self.window, seed=seed)
        pool, blocks = self.manager.pool, self.manager.store.blocks
        if pool.blocks_for(request.max_len) > blocks:
            capacity = blocks * pool.block_size
            raise ModelError(f"prompt and text are {request.max_len} tokens, but there is memory for {capacity}")
        self.scheduler.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; others may have its blocks from the next step on."""
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        self._end(request)

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    @property
    def busy(self) -> bool:
        """Whether the device is still working on the last step."""
        return self._pending is not None and not self._pending[1].ready

    @torch.inference_mode()
    def step(self) -> bool:
        """Read one token of each running text and a chunk of the new prompts; return False if idle."""
        work = self.scheduler.schedule()
        if work is None:
            self._catch_up()
            work = self.scheduler.schedule()
        assert work is not None, "no request is ahead of the host now"
        self.counts.steps += bool(work)
        in_flight = [request for request, _ in work] + ([] if self._pending is None else self._pending[0])
        try:
            if work:
                self._step(work)
            else:
                self._catch_up()
        except BaseException as error:
            if work and out_of_memory(error):
                self._free_memory(work, error)
                return not self.idle
            failure = error if isinstance(error, WeftError) else ModelError(f"the engine failed: {error}")
            for request in in_flight:
                self._end(request, failure)
            if not isinstance(error, WeftError):
                raise
        return not self.idle

    def _free_memory(self, work: Work, error: BaseException) -> None:
        """After a step ran out of memory, end the request that had the most to read, and read the others again."""
        self._catch_up()
        running = sorted((item for item in work if not item[0].ended), key=lambda item: item[1])
        failure = ModelError("not enough memory to read this text beside the others")
        failure.__cause__ = error
        for request, _ in running[:-1]:
            self.scheduler.requeue(request)
        for request, _ in running[-1:]:
            self._end(request, failure)

    def _step(self, work: Work) -> None:
        features = self.manager.read(work)
        self.counts.prompt += sum(size for request, size in work if not request.written and not request.ahead)
        complete = [index for index, (request, _) in enumerate(work) if not request.unread]
        if not complete:
            self._catch_up()
            return
        requests, features = _select([request for request, _ in work], features, complete)
        logits = self.manager.head(features)[:, : self.vocab_size]
        if self.manager.graphs is not None and not any(request.needs_host for request in requests):
            self._run_ahead(requests, logits)
            return
        self._catch_up()
        running = [index for index, request in enumerate(requests) if not request.ended]
        if running:
            self._write(*_select(requests, logits, running))

    def _run_ahead(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each request from logits (requests, V) on the device; then process the last step's."""
        logits, settings = logits.float(), [request.settings for request in requests]
        uniforms = [0.0 if request.settings.greedy else request.uniform() for request in requests]
        tokens = mark_invalid(choose_tokens(logits, settings, uniforms), logits)
        self.manager.set_newest(requests, tokens.clamp(min=0))
        pending = requests, TokenFetch(tokens)
        for request in requests:
            request.ahead += 1
        self._catch_up()
        self._pending = pending

    def _catch_up(self) -> None:
        if self._pending is None:
            return
        (requests, wait), self._pending = self._pending, None
        for request, token in zip(requests, wait(), strict=True):
            request.ahead -= 1
            if request.ended:
                continue  # it had ended before: one token too many
            if token < 0:
                self._end(request, invalid_logits_error(token))
            else:
                self.counts.written += 1
                self._deliver(request, request.push(token))

    def _write(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each request from logits (requests, V) on the host, and deliver it."""
        try:
            ready = adjust_logits(requests, logits)
        except ModelError as error:
            if len(requests) == 1:
                self._end(requests[0], error)
            else:  # retry one by one, so that only the request at fault fails
                for row, request in enumerate(requests):
                    self._write([request], logits[row : row + 1])
            return
        self.counts.written += len(requests)
        chunks = extend_texts(requests, logits, ready, agree=self.model.agree)
        for request, chunk in zip(requests, chunks, strict=True):
            self._deliver(request, chunk)

    def _deliver(self, request: Request, chunk: Chunk) -> None:
        request.chunks.append(chunk)
        if chunk.finish is not None:
            self._end(request)
        elif request.full:  # its last ids are read again, as after a preemption
            self.scheduler.requeue(request)
            request.slide()

    def _end(self, request: Request, error: WeftError | None = None) -> None:
        if not request.ended:
            self.scheduler.remove(request)
            request.ended, request.error = True, error


def _select(requests: list[Request], rows: Tensor, indices: list[int]) -> tuple[list[Request], Tensor]:
    if len(indices) == len(requests):
        return requests, rows
    return [requests[index] for index in indices], rows.index_select(0, on_device(torch.tensor(indices), rows.device))
