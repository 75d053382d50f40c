"""Many texts at once, with one model.

    engine = Engine(model, tokenizer)
    requests = [engine.submit(prompt, settings) for prompt in prompts]
    engine.run()
    texts = [request.completion().text for request in requests]

What a request gets depends on its prompt, its settings and its seed alone, whatever else is written meanwhile. One
thread steps the engine; any thread may submit, cancel, and wait for what comes.

On a GPU the engine runs one step ahead of the host: tokens are chosen on the device, the next step reads them there,
and the host sees them while that step runs. A text that has ended by then has one token too many, which is dropped. Its
blocks go to others only in steps that the device does later, so nothing is written into them behind anybody's back.
Where a token can be chosen only by what the host knows, as under a grammar, such a step waits for the host.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import BlockManager
from weft.decode.engine.requests import OneSource, Request
from weft.decode.engine.scheduler import Counts, Manager, Scheduler, Work
from weft.decode.engine.states import StateManager
from weft.decode.prompt import Prompt, check_prompts, choices, context_window
from weft.decode.rules import check_rules
from weft.decode.sampling import fetched, marked, on_device, picked, refusal
from weft.decode.text import Chunk, adjusted, write
from weft.errors import ModelError, WeftError
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer

BLOCKS, PREFILL = 2048, 512  # on a CPU
PREFILL_ON_CUDA = 2048  # products of fewer rows leave a large GPU idle in part
SHARE = 0.85  # of a GPU's free memory, for blocks; the rest is for what a step computes
MOST_BLOCKS = 1 << 15


@dataclass(frozen=True)
class Limits:
    """What an engine holds at a time.

    At most `rows` texts are written at a time. A Transformer keeps them in `blocks` blocks of `block_size` tokens;
    other models need none. At most `prefill` tokens of prompts are read in one step. Where blocks or prefill are None
    the device decides: a GPU has as many blocks as its free memory holds.
    """

    blocks: int | None = None
    block_size: int = 16
    rows: int = 256
    prefill: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ModelError(f"{field.name} = {value}: expected 1 or more")

    def blocks_for(self, model: Transformer) -> int:
        """`blocks`, or what the model's device has memory for."""
        table, config = model.embedding.weight, model.config
        if self.blocks is not None or not table.is_cuda:
            return self.blocks or BLOCKS
        free, _ = torch.cuda.mem_get_info(table.device)
        free += torch.cuda.memory_reserved(table.device) - torch.cuda.memory_allocated(table.device)
        size = 2 * config.layers * config.attention.groups * config.d_head * self.block_size * table.element_size()
        return max(1, min(MOST_BLOCKS, int(SHARE * free) // size))

    def prefill_on(self, device: torch.device) -> int:
        """`prefill`, or as much as keeps the device busy without holding the other texts up for long."""
        return self.prefill or (PREFILL_ON_CUDA if device.type == "cuda" else PREFILL)


Late = tuple[list[Request], Callable[[], list[int]]]  # requests, and the function that waits for a token of each


class Engine:
    """Writes many texts with one model."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, limits: Limits | None = None):
        limits = limits or Limits()
        self.model, self.tokenizer = model, tokenizer
        self.device, self.window = device_of(model), context_window(model)
        self.vocab_size = choices(model, tokenizer.vocab_size)
        self.manager: Manager = (
            BlockManager(model, limits.blocks_for(model), limits.block_size, limits.rows)
            if isinstance(model, Transformer)
            else StateManager(model)
        )
        self.counts = Counts()
        self.scheduler = Scheduler(self.manager, limits.rows, limits.prefill_on(self.device), self.counts)
        self._late: Late | None = None  # what was written in the last step, where the host hasn't seen it yet
        self._stepping = threading.Lock()

    # ---- from any thread

    def submit(
        self,
        prompt: str | Sequence[int] | Prompt,
        settings: Sampling | None = None,
        source: str | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Request:
        """Ask for a text that continues `prompt`, or one that is written from a source.

        It is drawn with `seed`, by default the settings'. What can't be written at all is refused here.
        """
        settings = settings or Sampling()
        prompt = prompt if isinstance(prompt, Prompt) else Prompt.of(self.tokenizer, prompt)
        if source is not None:
            settings = settings.model_copy(update={"slide": False})  # the source belongs to its beginning
        check_prompts(self.model, [prompt], [settings.slide])
        check_rules([settings], self.vocab_size)
        given = None
        if source is not None:
            words = self.tokenizer.encode(source) if isinstance(source, str) else list(source)
            if not words:
                raise ModelError("the source is empty; it needs at least one token")
            given = OneSource(torch.tensor([words], device=self.device))
        request = Request(prompt, settings, self.window, settings.seed if seed is None else seed, given)
        self.manager.check(request)
        self.scheduler.add(request)
        return request

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.scheduler.unfinished

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until there is something to do, or for `timeout` seconds; True if there is."""
        return self.scheduler.wait(timeout)

    # ---- from the thread that steps the engine

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    @torch.inference_mode()
    def step(self) -> bool:
        """Read a token of each text that is being written and a chunk of the new prompts; False if idle."""
        with self._stepping:
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
        requests = [request for request, _ in work]
        features = self.manager.read(requests, [size for _, size in work])
        self.counts.prompt += sum(size for request, size in work if not request.written and not request.ahead)
        read = [place for place, request in enumerate(requests) if not request.unread]
        if not read:
            self._catch_up()
            return
        if len(read) < len(requests):
            features = self._some(features, read)
            requests = [requests[place] for place in read]
        logits = self.model.head(features.unsqueeze(1))[:, 0, : self.vocab_size]
        if self.manager.runs_ahead and not any(request.needs_host for request in requests):
            self._run_ahead(requests, logits)
            return
        self._catch_up()
        going_on = [place for place, request in enumerate(requests) if not request.ended.is_set()]
        if len(going_on) < len(requests):
            logits = self._some(logits, going_on)
            requests = [requests[place] for place in going_on]
        if requests:
            self._write(requests, logits)

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
            if request.ended.is_set():
                continue  # it had ended before: one token too many
            if token < 0:
                self._end(request, refusal(token))
            else:
                self.counts.written += 1
                self._hand_on(request, request.push(token))

    def _some(self, rows: Tensor, places: list[int]) -> Tensor:
        return rows.index_select(0, on_device(torch.tensor(places), rows.device))

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
        if request.cancelled:
            return  # it leaves before the next step, with what it has
        request.add(chunk)
        if chunk.finish is not None:
            self._end(request)
        elif request.full:
            self.scheduler.slide(request)

    def _end(self, request: Request, error: WeftError | None = None) -> None:
        """A text is complete, or has failed."""
        if not request.ended.is_set():
            self.scheduler.remove(request)
            request.end(error)
