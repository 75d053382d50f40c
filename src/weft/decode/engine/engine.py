"""Many texts at once, with one model.

    engine = Engine(model, tokenizer)
    requests = [engine.submit(prompt, settings) for prompt in prompts]
    engine.run()
    texts = [request.completion().text for request in requests]

What a request gets depends on its prompt, its settings and its seed alone, whatever else is written meanwhile. One
thread steps the engine; any thread may submit, cancel, and wait for what comes.
"""

import threading
from collections.abc import Sequence
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
from weft.decode.text import adjusted, write
from weft.errors import ModelError, WeftError
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """What an engine holds at a time.

    At most `rows` texts are written at a time. A Transformer keeps them in `blocks` blocks of `block_size` tokens;
    other models need none. At most `prefill` tokens of prompts are read in one step.
    """

    blocks: int = 2048
    block_size: int = 16
    rows: int = 256
    prefill: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ModelError(f"{field.name} = {getattr(self, field.name)}: expected 1 or more")


class Engine:
    """Writes many texts with one model."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, limits: Limits | None = None):
        limits = limits or Limits()
        self.model, self.tokenizer = model, tokenizer
        self.device, self.window = device_of(model), context_window(model)
        self.vocab_size = choices(model, tokenizer.vocab_size)
        self.manager: Manager = (
            BlockManager(model, limits.blocks, limits.block_size, limits.rows)
            if isinstance(model, Transformer)
            else StateManager(model)
        )
        self.counts = Counts()
        self.scheduler = Scheduler(self.manager, limits.rows, limits.prefill, self.counts)
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
            if work:
                self.counts.steps += 1
                try:
                    self._step(work)
                except Exception as error:
                    failed = error if isinstance(error, WeftError) else ModelError(f"the engine failed: {error}")
                    for request, _ in work:
                        self._end(request, failed)
                    if not isinstance(error, WeftError):
                        raise
            return not self.idle

    def _step(self, work: Work) -> None:
        requests = [request for request, _ in work]
        features = self.manager.read(requests, [size for _, size in work])
        self.counts.prompt += sum(size for request, size in work if not request.written)
        read = [place for place, request in enumerate(requests) if not request.unread]
        if not read:
            return
        if len(read) < len(requests):
            features = features[torch.tensor(read, device=features.device)]
            requests = [requests[place] for place in read]
        self._write(requests, self.model.head(features.unsqueeze(1))[:, 0, : self.vocab_size])

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
            if request.cancelled:
                continue  # it leaves before the next step, with what it has
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
