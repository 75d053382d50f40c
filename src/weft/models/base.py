"""The contract of every generative model, whatever is inside it.

    state = model.start(batch, max_len, source)      # nothing read yet
    logits = model.step(tokens, state)               # read some tokens, predict what follows each

Decoding, scoring and serving know nothing else about a model.
"""

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
from weft.nn.recurrent import Carried
from weft.nn.scaled_dot_product import Probabilities

# beginnings of parameters' names in checkpoints that older versions wrote, and what they are today
RENAMED = {"output.follows.": "output.next_sentence."}  # 0.1
T = TypeVar("T")
Pass = Callable[..., Tensor]


class Source(Protocol):
    """What a sequence-to-sequence model reads before it writes."""

    @property
    def tokens(self) -> Tensor:
        """(batch, source time)."""

    @property
    def mask(self) -> Tensor | None:
        """(batch, source time), True where a token is real."""


class Peers(Protocol):
    """The processes that hold a model together."""

    @property
    def ranks(self) -> int:
        """How many they are."""

    def share(self, make: Callable[[], T]) -> T:
        """What the first of them makes, on all of them."""


class State:
    """What a model keeps of the tokens it has read, one row a sequence.

    Rows may be of different lengths. `lengths` is on the device; `longest` is an upper bound that is known on the
    host, and `even` is True if all rows are equally long, so that fast paths need no mask.
    """

    can_grow = False  # otherwise `start` must be given the final `max_len`

    def __init__(self, batch: int, max_len: int, device: torch.device):
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.max_len = max_len
        self.longest = 0
        self.even = True

    def advance(self, time: int, lengths: Tensor | None = None) -> None:
        """Count `time` more tokens in every row, or `lengths` (batch,) of them where rows are padded on the right."""
        self.lengths = self.lengths + (time if lengths is None else lengths.to(self.lengths))
        self.longest = min(self.longest + time, self.max_len)
        self.even = self.even and lengths is None

    def reserve(self, time: int) -> None:
        """Refuse to read past the `max_len` that was asked for."""
        if self.longest + time > self.max_len:
            started = f"the {self.max_len} that decoding was started with"
            raise ModelError(f"{self.longest} + {time} tokens do not fit in {started}")

    def grow(self, max_len: int) -> bool:
        """Raise the capacity to `max_len` tokens per row; return whether memory moved (never, if not `can_grow`)."""
        if not self.can_grow or max_len <= self.max_len:
            return False
        self._append(max_len - self.max_len)
        self.max_len = max_len
        return True

    def _append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row. Implemented by states that `can_grow`."""
        raise NotImplementedError

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from where row index[i] is; the batch may grow or shrink. index (new batch,)."""
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
    """A model that gives each token of a sequence a distribution over the next one."""

    config: Config
    peers: Peers | None = None  # the processes that hold the model together, where several do

    def __init__(self) -> None:
        super().__init__()
        self._wrapped: list[Pass] = []

    # forward_features(tokens, …): whole sequences (batch, time) read at once → (batch, time, …) for `head`. What else
    # may be given (a source, document ids, a mask) is each model's own.
    forward_features: Pass

    def features(self, tokens: Tensor, **given: Any) -> Tensor:
        """`forward_features`, through whatever it is wrapped in."""
        return (self._wrapped[-1] if self._wrapped else self.forward_features)(tokens, **given)

    def read(self, batch: Batch, carried: Carried | None = None) -> Tensor:
        """The features of a batch's tokens; a recurrent model reads on from what is `carried`."""
        return self.features(batch.tokens, **inputs(batch, carried))

    def wrap(self, around: Callable[[Pass], Pass]) -> None:
        """Have whole sequences go through `around(pass)` from now on, in the place of the pass.

        This is the one way to change how a model's pass is computed: compiled, padded, or in stages over processes.
        What is wrapped last is entered first.
        """
        self._wrapped.append(around(self._wrapped[-1] if self._wrapped else self.forward_features))

    @contextmanager
    def wrapped(self, around: Callable[[Pass], Pass]) -> Iterator[None]:
        """The same for a while."""
        self.wrap(around)
        try:
            yield
        finally:
            self._wrapped.pop()

    @property
    def parts(self) -> int:
        """Processes that hold the model together: with more than one, this process has a part of each matrix."""
        return 1 if self.peers is None else self.peers.ranks

    def agree(self, chosen: T) -> T:
        """What the first of the processes that hold the model has chosen: all go on with that. Alone, `chosen`."""
        return chosen if self.peers is None else self.peers.share(lambda: chosen)

    def reset_parameters(self) -> None:
        """Draw all weights anew, also those of a model that was built empty and then given memory (`to_empty`)."""
        for part in self.modules():
            if part is not self and hasattr(part, "reset_parameters"):
                part.reset_parameters()  # type: ignore[operator]

    @property
    def alignment(self) -> Probabilities | None:
        """What the probabilities over the source pass through, (batch, [heads,] time, source time)."""
        return None

    def start(self, batch: int, max_len: int, source: Source | None = None) -> State:
        """An empty state for `batch` sequences of up to `max_len` tokens."""
        raise ModelError(f"{self._name()} cannot generate: it has no decoder")

    def advance(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time) after what `state` has read; features (batch, time, …) for `head`.

        Rows of unequal length are padded on the right with any token and counted by `lengths` (batch,);
        features at padded places are meaningless, and the next call overwrites what they left in the state.
        """
        raise ModelError(f"{self._name()} cannot generate: it has no decoder")

    def head(self, features: Tensor) -> Tensor:
        """Logits (batch, time, vocab_size) of the token after each place."""
        readout = self.readout(features)
        assert readout is not None, "logits that are no product have a head of their own"
        return readout.logits()

    def readout(self, features: Tensor) -> Readout | None:
        """What the logits are a product of, for losses that never hold all of them; None where they are no product."""
        return None

    def step(self, tokens: Tensor, state: State, lengths: Tensor | None = None) -> Tensor:
        """Logits (batch, time, vocab_size) after each of tokens (batch, time), which `state` then holds."""
        return self.head(self.advance(tokens, state, lengths))

    def forward(self, tokens: Tensor, **given: Any) -> Tensor:
        """Logits (batch, time, vocab_size) of the token after each place of whole sequences (batch, time)."""
        return self.head(self.features(tokens, **given))

    def _name(self) -> str:
        return f"a model of kind '{getattr(self.config, 'kind', type(self).__name__)}'"


def inputs(batch: Batch, carried: Carried | None = None) -> dict[str, Any]:
    """What a pass is given of a batch besides its tokens."""
    given = {key: getattr(batch, key) for key in ("positions", "documents", "mask", "segments", "source")}
    given |= {"ranges": batch.ranges or None, "carried": carried, "rng": row_rng(batch)}
    return {key: value for key, value in given.items() if value is not None}


def row_rng(batch: Batch) -> RowRng | None:
    """What the dropouts of a batch's pass draw from; None for torch's own generators."""
    return None if batch.keys is None else RowRng(batch.keys, batch.ranges)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are; n-grams have none, and stand on the processor."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """A model as it is used, without dropout; afterwards as it was. Gives the device that it is on."""
    was_training = model.training
    model.eval()
    try:
        yield device_of(model)
    finally:
        model.train(was_training)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary. On a GPU this would wait for the device, so the caller checks on the host."""
    if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
        check_range(int(tokens.min()), int(tokens.max()), vocab_size)


def check_range(low: int, high: int, vocab_size: int) -> None:
    """Refuse a lowest or a highest token id that is outside the vocabulary."""
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ModelError(f"token id {wrong} is outside the vocabulary of {vocab_size} (0 … {vocab_size - 1})")


def current_name(name: str) -> str:
    """The name that a saved parameter, or an optimizer's moment of one (`exp_avg/name`), has today."""
    moment, slash, parameter = name.rpartition("/")
    for old, new in RENAMED.items():
        if parameter.startswith(old):
            return moment + slash + new + parameter.removeprefix(old)
    return name
