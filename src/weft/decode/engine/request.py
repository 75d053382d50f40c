"""One text among many: what was asked for, how far it is, and what has been written of it."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.blocks import Text
from weft.decode.generate import Constraint, Finish
from weft.decode.shaping import Past
from weft.decode.writing import Completion, Piece, Writer, gather
from weft.errors import ModelError, WeftError
from weft.text.tokenizer import Tokenizer

AHEAD = 64  # random numbers that a request draws at a time

Listener = Callable[[Piece], None]


@dataclass
class OneSource:
    """What one text is written from: tokens (1, source time)."""

    tokens: Tensor
    mask: Tensor | None = None


@dataclass(eq=False)
class Request(Text):
    """A text that was asked for. Its pieces come as they are written: iterate to wait for them."""

    settings: Sampling = field(default_factory=Sampling)
    prompt: int = 0  # tokens of the prompt, at the beginning of `ids`
    tokenizer: Tokenizer = field(kw_only=True)
    begun: bool = False  # the text goes on with what the prompt says
    constraint: Constraint | None = None
    ends: frozenset[int] = frozenset()
    listener: Listener | None = None
    past: Past | None = None
    pieces: list[Piece] = field(default_factory=list)
    error: WeftError | None = None
    cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = self.settings
        self.writer = Writer(self.tokenizer, rules.stop, self.begun)
        self.shapes = bool(
            rules.penalises or rules.logit_bias or rules.banned or rules.min_tokens or rules.forced or self.constraint
        )
        self._generator = torch.Generator().manual_seed(rules.seed)
        self._uniforms: list[float] = []
        self._news: SimpleQueue[Piece | None] = SimpleQueue()

    @property
    def written(self) -> int:
        """Tokens written so far."""
        return len(self.ids) - self.prompt

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None while it is being written, and where it was cancelled or failed."""
        return self.pieces[-1].finish if self.pieces else None

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, waiting for each; once through. Another thread has to turn the engine meanwhile."""
        while (news := self._news.get()) is not None:
            yield news
        if self.error is not None:
            raise self.error

    def completion(self) -> Completion:
        """The whole text, once it has ended."""
        if self.error is not None:
            raise self.error
        if self.finish is None:
            state = "was cancelled" if self.cancelled else "is still being written"
            raise ModelError(f"request {self.number} {state} after {self.written} tokens")
        return gather(iter(self.pieces), self.tokenizer, [self.begun])[0]

    def uniform(self) -> float:
        """The next number in [0, 1) of this request's own sequence: one a token, as `choose` draws them."""
        if not self._uniforms:
            self._uniforms = torch.rand(AHEAD, dtype=torch.float64, generator=self._generator).tolist()[::-1]
        return self._uniforms.pop()

    def tell(self, news: Piece | None) -> None:
        """Hand on a piece, or that nothing follows."""
        if news is not None:
            self.pieces.append(news)
            try:
                if self.listener is not None:
                    self.listener(news)
            except Exception:
                self.cancelled = True  # whoever fails to listen needs no more of it; the others do
        self._news.put(news)
        if news is None:
            self.ended.set()
