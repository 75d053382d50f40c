"""Contract of every generative model.

    state = model.start(batch, max_len, source)      # nothing read yet
    logits = model.step(tokens, state)               # read tokens, predict the token after each

Decoding, scoring and serving use nothing else of a model.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.config import Config
from weft.data.batch import Batch
from weft.errors import ModelError
from weft.nn.dropout import RowRng
from weft.nn.loss import Readout
from weft.nn.recurrent import CarriedState
from weft.nn.scaled_dot_product import Probabilities
from weft.progress import pause

RENAMED = {"output.follows.": "output.next_sentence."}  # prefixes of parameter names in checkpoints of weft 0.1
READ_CHUNK, READ_CHUNK_ON_CUDA = 1 << 10, 1 << 14  # tokens of a long text that are read between two pauses
T = TypeVar("T")
Pass = Callable[..., Tensor]


def step_size(model: "LanguageModel", tokens: int, before: int) -> int:
    """Return how many tokens a CPU reads after `before` others in the time for `tokens` at a text's beginning."""
    if device_of(model).type == "cuda":  # fast enough anywhere
        return tokens
    even = 6 * getattr(model.config, "d_model", tokens)  # a layer has about 12 d_model² weights
    return max(tokens // 8, tokens * even // (even + before), 1)


def read_in_steps(model: "LanguageModel", tokens: int, rows: int = 1) -> Iterator[slice]:
    """Yield the parts of texts of this many tokens that are read one after another, with pauses between them."""
    most, first = READ_CHUNK_ON_CUDA if device_of(model).type == "cuda" else READ_CHUNK, 0
    while first < tokens:
        last = min(tokens, first + max(1, step_size(model, most, first) // rows))
        yield slice(first, last)
        pause()
        first = last


class EncoderInput(Protocol):
    """Source of a sequence-to-sequence model: tokens and mask (batch, source time), True where a token is real."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor | None: ...


class Peers(Protocol):
    """Processes that a model is sharded over; `share` returns rank 0's value on every rank."""

    @property
    def ranks(self) -> int: ...
    def share(self, make: Callable[[], T]) -> T: ...


class State:
    """Decoding state: everything a model keeps about the tokens read so far, one row per sequence.

    Rows may differ in length. `lengths` is on the device; `longest` is an upper bound known on the host; `even` is True
    if all rows have the same length, so that fast paths need no mask.
    """

    can_grow = False  # otherwise `start` must be given the final `max_len`

    def __init__(self, batch: int, max_len: int, device: torch.device):
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.max_len = max_len
        self.longest = 0
        self.even = True

    def advance(self, time: int, lengths: Tensor | None = None) -> None:
        """Count `time` more tokens in every row, or `lengths` (batch,) if rows are padded on the right."""
        self.lengths = self.lengths + (time if lengths is None else lengths.to(self.lengths))
        self.longest = min(self.longest + time, self.max_len)
        self.even = self.even and lengths is None

    def reserve(self, time: int) -> None:
        """Raise ModelError if `time` more tokens exceed `max_len`."""
        if self.longest + time > self.max_len:
            raise ModelError(f"{self.longest} + {time} tokens exceed the {self.max_len} that decoding was started with")

    def grow(self, max_len: int) -> bool:
        """Raise the capacity to `max_len` tokens per row; return whether memory moved (never, if not `can_grow`)."""
        if not self.can_grow or max_len <= self.max_len:
            return False
        self._append(max_len - self.max_len)
        self.max_len = max_len
        return True

    def _append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row."""
        raise NotImplementedError("a state that can grow must override this")

    def reorder(self, index: Tensor) -> None:
        """Make row i continue from row `index[i]`; index (new batch,), so the batch may grow or shrink."""
        self.lengths = self.lengths[index]

    def truncate(self, lengths: int | Tensor) -> None:
        """Forget all but the first `lengths` tokens, of every row or row by row (batch,)."""
        if isinstance(lengths, int):
            self.even = self.even or bool((self.lengths >= lengths).all())
            self.lengths = self.lengths.clamp(max=lengths)
            self.longest = min(self.longest, lengths)
        else:
            self.lengths = torch.minimum(self.lengths, lengths.to(self.lengths))
            self.longest = int(self.lengths.max())
            self.even = False


class LanguageModel(nn.Module):
    """Model that predicts a distribution over the next token for each token of a sequence."""

    config: Config
    peers: Peers | None = None  # set if the model is sharded over several processes

    def __init__(self) -> None:
        super().__init__()
        self._wrapped: list[Pass] = []

    # forward_features(tokens, …): read whole sequences (batch, time) in one call → (batch, time, …) for `head`. Each
    # model has its own keyword arguments (a source, document ids, a mask).
    forward_features: Pass

    def features(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Features from `forward_features`, or from the function that wraps it."""
        return (self._wrapped[-1] if self._wrapped else self.forward_features)(tokens, **inputs)

    def read(self, batch: Batch, carried: CarriedState | None = None, routing: list[Tensor] | None = None) -> Tensor:
        """Features of a batch; a recurrent model continues from the `carried` state, and routers of experts append
        their sums to `routing`."""
        return self.features(batch.tokens, **inputs(batch, carried, routing))

    def wrap(self, around: Callable[[Pass], Pass]) -> None:
        """Replace the pass over whole sequences by `around(pass)`. This is the only way to change how a pass is
        computed: compiled, padded, or in pipeline stages. The last wrapper is entered first."""
        self._wrapped.append(around(self._wrapped[-1] if self._wrapped else self.forward_features))

    @contextmanager
    def wrapped(self, around: Callable[[Pass], Pass]) -> Iterator[None]:
        """Apply `wrap` as a context manager; undone on exit."""
        self.wrap(around)
        try:
            yield
        finally:
            self._wrapped.pop()

    @property
    def shards(self) -> int:
        """Number of processes that the model is sharded over; 1 if every process has all weights."""
        return 1 if self.peers is None else self.peers.ranks

    def agree(self, choice: T) -> T:
        """Return rank 0's choice on every rank of a sharded model; otherwise, `choice`."""
        return choice if self.peers is None else self.peers.share(lambda: choice)

    def reset_parameters(self) -> None:
        """Draw all weights again, including those of a model that was built empty and then allocated (`to_empty`)."""
        for part in self.modules():
            if part is not self and hasattr(part, "reset_parameters"):
                part.reset_parameters()  # type: ignore[operator]

    @property
    def alignment(self) -> Probabilities | None:
        """Tap of the attention probabilities over the source, (batch, [heads,] time, source time)."""
        return None

    def start(self, batch: int, max_len: int, source: EncoderInput | None = None) -> State:
        """Return an empty state for `batch` sequences of up to `max_len` tokens."""
        raise ModelError(f"{self._name()} cannot generate: it has no decoder")

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) after those in `state`; return features (batch, time, …) for `head`.

        Rows of unequal length are padded on the right with any token and counted by `lengths` (batch,). Features of
        padding are meaningless, and the next call overwrites its entries in the state.
        """
        raise ModelError(f"{self._name()} cannot generate: it has no decoder")

    def head(self, features: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size) of the token after each position."""
        readout = self.readout(features)
        assert readout is not None, "a model without a readout must override head"
        return readout.logits()

    def readout(self, features: Tensor) -> Readout | None:
        """Factors of the logits, for losses that never hold all logits; None if the logits are not a product."""
        return None

    def step(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) into `state`; return the logits (batch, time, vocab_size) after each."""
        return self.head(self.advance(tokens, state, lengths))

    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        """Logits (batch, time, vocab_size) of the token after each position of whole sequences (batch, time)."""
        return self.head(self.features(tokens, **inputs))

    def _name(self) -> str:
        return f"a model of kind '{getattr(self.config, 'kind', type(self).__name__)}'"


def inputs(batch: Batch, carried: CarriedState | None = None, routing: list[Tensor] | None = None) -> dict[str, Any]:
    """Keyword arguments of a pass over a batch, besides its tokens; those that are None are left out."""
    named = {name: getattr(batch, name) for name in ("positions", "documents", "mask", "segments", "source")}
    named |= {"ranges": batch.ranges or None, "carried": carried, "rng": row_rng(batch)}
    named["routing"] = routing
    return {name: value for name, value in named.items() if value is not None}


def row_rng(batch: Batch) -> RowRng | None:
    """Generator for the dropouts of a pass over a batch; None: torch's generators."""
    return None if batch.keys is None else RowRng(batch.keys, batch.ranges, step=batch.step_key)


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's weights; the CPU for n-gram models, which have none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Put a model into evaluation mode and restore its mode on exit; yield its device."""
    was_training = model.training
    model.eval()
    try:
        yield device_of(model)
    finally:
        model.train(was_training)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ModelError if ids are outside the vocabulary. A GPU would have to wait, so callers check on the host."""
    if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
        check_range(int(tokens.min()), int(tokens.max()), vocab_size)


def check_range(low: int, high: int, vocab_size: int) -> None:
    """Raise ModelError if the lowest or highest token id is outside the vocabulary."""
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ModelError(f"token id {wrong} is outside the vocabulary of {vocab_size} (0 … {vocab_size - 1})")


def current_name(name: str) -> str:
    """Current name of a saved parameter, or of an optimizer's moment of one (`exp_avg/name`)."""
    for old, new in RENAMED.items():
        name = re.sub(rf"(^|/){re.escape(old)}", rf"\g<1>{new}", name)
    return name
