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

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager
from weft.decode.engine.requests import Request, Work
from weft.decode.engine.scheduler import Counts, Scheduler
from weft.decode.prompt import Prompt, context_window
from weft.decode.sampling import fetched, marked, on_device, picked, refusal
from weft.decode.text import Chunk, adjusted, write
from weft.errors import ModelError, WeftError
from weft.models.transformer import Transformer

PREFILL, PREFILL_ON_CUDA = 512, 2048  # products of fewer rows leave a large GPU idle in part


@dataclass(frozen=True)
class Limits:
    """What an engine holds at a time.

    At most `rows` texts are written at a time, in `blocks` blocks of `block_size` tokens. At most `prefill` tokens of
    prompts are read in one step; None: as many as keep the device busy without holding the other texts up for long.
    """

    blocks: int = 2048
    block_size: int = 16
    rows: int = 256
    prefill: int | None = None


Late = tuple[list[Request], Callable[[], list[int]]]  # requests, and the function that waits for a token of each


class Engine:
    """Writes many texts with one decoder, of tokens below `vocab_size`."""

    def __init__(self, model: Transformer, vocab_size: int, limits: Limits):
        self.model, self.vocab_size = model, vocab_size
        self.device, self.window = model.embedding.weight.device, context_window(model)
        self.manager = BlockManager(model, limits.blocks, limits.block_size, limits.rows)
        self.counts = Counts()
        prefill = limits.prefill or (PREFILL_ON_CUDA if self.device.type == "cuda" else PREFILL)
        self.scheduler = Scheduler(self.manager, limits.rows, prefill, self.counts)
        self._numbers = count(1)  # of requests, in the order they come
        self._late: Late | None = None  # what was written in the last step, where the host hasn't seen it yet

    def submit(self, prompt: Prompt, settings: Sampling, seed: int) -> Request:
        """Ask for a text that continues a prompt that was checked."""
        request = Request(next(self._numbers), prompt, settings, self.window, seed)
        assert self.manager.pool.blocks_for(request.longest) <= self.manager.store.blocks, "any text fits in alone"
        self.scheduler.waiting.append(request)
        return request

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
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
        except Exception as error:
            failed = error if isinstance(error, WeftError) else ModelError(f"the engine failed: {error}")
            for request in involved:
                self._end(request, failed)
            if not isinstance(error, WeftError):
                raise
        return not self.idle

    def _step(self, work: Work) -> None:
        features = self.manager.read(work)
        self.counts.prompt += sum(size for request, size in work if not request.written and not request.ahead)
        all_read = [place for place, (request, _) in enumerate(work) if not request.unread]
        if not all_read:
            self._catch_up()
            return
        requests, features = _those([request for request, _ in work], features, all_read)
        logits = self.model.head(features.unsqueeze(1))[:, 0, : self.vocab_size]
        if self.manager.runs_ahead and not any(request.needs_host for request in requests):
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
        tokens = marked(picked(logits, settings, uniforms), logits)
        self.manager.keep(requests, tokens.clamp(min=0))
        late = requests, fetched(tokens)
        for request in requests:
            request.ahead += 1
        self._catch_up()
        self._late = late

    def _catch_up(self) -> None:
        """Hand on what was written in the last step, if the host hasn't seen it yet."""
        if self._late is None:
            return
        (requests, arrived), self._late = self._late, None
        for request, token in zip(requests, arrived(), strict=True):
            request.ahead -= 1
            if request.ended:
                continue  # it had ended before: one token too many
            if token < 0:
                self._end(request, refusal(token))
            else:
                self.counts.written += 1
                self._hand_on(request, request.push(token))

    def _write(self, requests: list[Request], logits: Tensor) -> None:
        """Choose a token for each request from logits (requests, V), and hand on what it adds."""
        try:
            ready = adjusted(requests, logits)
        except ModelError as error:
            if len(requests) == 1:
                self._end(requests[0], error)
            else:  # of one of them: the others are none the worse for it
                for row, request in enumerate(requests):
                    self._write([request], logits[row : row + 1])
            return
        self.counts.written += len(requests)
        for request, chunk in zip(requests, write(requests, logits, ready, self.model.agree), strict=True):
            self._hand_on(request, chunk)

    def _hand_on(self, request: Request, chunk: Chunk) -> None:
        request.chunks.append(chunk)
        if chunk.finish is not None:
            self._end(request)
        elif request.full:
            self.scheduler.slide(request)

    def _end(self, request: Request, error: WeftError | None = None) -> None:
        """A text is complete, or has failed."""
        if not request.ended:
            self.scheduler.remove(request)
            request.ended, request.error = True, error


def _those(requests: list[Request], rows: Tensor, places: list[int]) -> tuple[list[Request], Tensor]:
    """The requests at these places, and their rows."""
    if len(places) == len(requests):
        return requests, rows
    return [requests[place] for place in places], rows.index_select(0, on_device(torch.tensor(places), rows.device))
