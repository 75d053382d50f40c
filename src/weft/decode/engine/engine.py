"""Many texts at once, with one model.

    engine = Engine(model, tokenizer)
    requests = [engine.submit(prompt, settings) for prompt in prompts]
    engine.run()
    texts = [request.completion().text for request in requests]

What a request gets depends on its prompt, its settings and its seed alone, whatever else is written meanwhile.

On a GPU the engine runs one step ahead of the host: tokens are chosen on the device, the next step reads them there,
and the host sees them while that step runs. A text that has ended by then has one token too many, which is dropped. Its
blocks go to others only in steps that the device does later, so nothing is written into them behind anybody's back.
Where a token can be chosen only by what the host knows, as under a grammar, such a step waits for the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager
from weft.decode.engine.requests import Request, Work
from weft.decode.engine.scheduler import Counts, Scheduler
from weft.decode.prompt import Prompt, check_prompts, choices, context_window
from weft.decode.rules import check_rules
from weft.decode.sampling import fetched, marked, on_device, picked, refusal
from weft.decode.text import Chunk, adjusted, write
from weft.errors import ModelError, WeftError
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ModelError(f"{field.name} = {value}: expected 1 or more")


Late = tuple[list[Request], Callable[[], list[int]]]  # requests, and the function that waits for a token of each


class Engine:
    """Writes many texts with one decoder."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, limits: Limits | None = None):
        limits = limits or Limits()
        self.model, self.tokenizer = model, tokenizer
        self.device, self.window = model.embedding.weight.device, context_window(model)
        self.vocab_size = choices(model, tokenizer.vocab_size)
        self.manager = BlockManager(model, limits.blocks, limits.block_size, limits.rows)
        self.counts = Counts()
        prefill = limits.prefill or (PREFILL_ON_CUDA if self.device.type == "cuda" else PREFILL)
        self.scheduler = Scheduler(self.manager, limits.rows, prefill, self.counts)
        self._numbers = count(1)  # of requests, in the order they come
        self._late: Late | None = None  # what was written in the last step, where the host hasn't seen it yet

    def submit(
        self, prompt: str | Sequence[int] | Prompt, settings: Sampling | None = None, seed: int | None = None
    ) -> Request:
        """Ask for a text that continues `prompt`, drawn with `seed`, by default the settings'.

        What can't be written at all is refused here.
        """
        settings = settings or Sampling()
        prompt = prompt if isinstance(prompt, Prompt) else Prompt.of(self.tokenizer, prompt)
        check_prompts(self.model, [prompt], [settings.slide])
        check_rules([settings], self.vocab_size)
        seed = settings.seed if seed is None else seed
        request = Request(next(self._numbers), prompt, settings, self.window, seed)
        if request.longest > (capacity := self.manager.pool.capacity):
            raise ModelError(
                f"prompt and max_tokens make {request.longest} tokens, but the cache's capacity is {capacity}"
            )
        self.scheduler.waiting.append(request)
        return request

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.scheduler.waiting or self.scheduler.running)

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

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
