"""Which window of the text comes at which step: a pure function of the seed, the step and the rank.

There is no state to save: resuming at step n costs nothing, and another number of processes shares out the same
windows in the same order. Within an epoch every window comes exactly once, in an order that is a keyed permutation
(a Feistel network with cycle walking, Black and Rogaway 2002), computed for the wanted indices alone.

A mixture has several texts with weights: of the first n samples each text has its share to within a window or two, at
every n, and the samples of one text are its windows 0, 1, 2 … in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from weft.errors import DataError

Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
ROUNDS = 6
MAX_SHARES = 2**31  # that weights are counted in, so that sample × share fits in 64 bits


@dataclass(frozen=True)
class Windows:
    """Windows of `length` inputs and their targets, one token later, over a text of `tokens` tokens.

    Windows follow each other at a stride of `length`. Where they begin shifts from epoch to epoch, by less than a
    window, so that a small text read many times isn't cut at the same places each time.
    """

    tokens: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < self.length + 1:
            raise DataError(
                f"the text has {self.tokens} tokens, a window of {self.length} needs {self.length + 1}: "
                "add text or shorten batch.length"
            )

    @property
    def count(self) -> int:
        """Windows in an epoch."""
        return max(1, (self.tokens - self.length) // self.length)

    def starts(self, samples: npt.ArrayLike) -> Array:
        """The first tokens of the windows that these global samples are. Sample 0 is the first row of step 0."""
        epoch, place = np.divmod(np.asarray(samples, dtype=np.int64), self.count)
        slack = min(self.length - 1, self.tokens - 1 - self.count * self.length)
        shift = _hash(epoch.astype(np.uint64), _key(self.seed, 1)) % np.uint64(slack + 1)
        return permute(place, self.count, epoch, self.seed) * self.length + shift.astype(np.int64)


@dataclass(frozen=True)
class Lanes:
    """A text read at `lanes` places side by side, each step `length` tokens on from where the one before ended.

    So a recurrent model can carry its state from step to step (truncated back-propagation through time; Werbos 1990,
    Mikolov et al. 2010). After an epoch all lanes begin again, shifted by less than a window.
    """

    tokens: int
    length: int
    lanes: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.steps:
            raise DataError(
                f"the text has {self.tokens} tokens, and {self.lanes} rows of {self.length} that continue each other "
                f"need {self.lanes * self.length + 1}: add text, or lower batch.size or batch.length"
            )

    @property
    def span(self) -> int:
        """Tokens that are a lane's own."""
        return (self.tokens - 1) // self.lanes

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.span // self.length

    def starts(self, step: int) -> Array:
        """The first tokens (lanes,) of the windows at `step`, counted from 0."""
        epoch, window = divmod(step, self.steps)
        hashed = int(_hash(np.array([epoch], dtype=np.uint64), _key(self.seed, 1))[0])
        shift = hashed % (self.span - self.steps * self.length + 1)
        return np.arange(self.lanes, dtype=np.int64) * self.span + shift + window * self.length

    def begins(self, step: int) -> bool:
        """Whether the lanes begin at `step`."""
        return step % self.steps == 0


def rows(step: int, batch: int, rank: int = 0, ranks: int = 1) -> Array:
    """The global samples that `rank` takes at `step`: its contiguous part of the batch's rows."""
    assert 0 <= rank < ranks <= batch, f"rank {rank} of {ranks}, batch {batch}"
    first = step * batch
    return np.arange(first + rank * batch // ranks, first + (rank + 1) * batch // ranks, dtype=np.int64)


# ---- several texts with weights


def shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights as they are written: 0.6, 0.22 → 30, 11."""
    if not weights or min(weights) <= 0:
        raise DataError(f"weights {list(weights)}: a mixture needs one or more weights above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    total = sum(whole)
    return whole if total <= MAX_SHARES else [max(1, part * MAX_SHARES // total) for part in whole]


def assign(samples: npt.ArrayLike, weights: Sequence[float]) -> tuple[Array, Array]:
    """For each global sample its source, and its place among the samples of that source.

    The first source takes its share evenly out of all samples, the second its share of what is left, and so on: of
    the first n samples a share of a/b takes exactly ⌊n·a/b⌋.
    """
    left = np.asarray(samples, dtype=np.int64).copy()  # the sample's place among those no source has taken yet
    source = np.full(left.shape, len(weights) - 1, dtype=np.int64)
    place = np.zeros_like(left)
    parts = shares(weights)
    waiting = np.ones(left.shape, dtype=bool)
    for number, part in enumerate(parts):
        total = sum(parts[number:])
        before = left * part // total
        taken = waiting & ((left + 1) * part // total > before)
        source[taken] = number
        place[taken] = before[taken]
        waiting &= ~taken
        left = left - before
    return source, place


@dataclass(frozen=True)
class Mixture:
    """Several texts' windows, served in the proportion of their weights."""

    windows: tuple[Windows, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.windows) == len(self.weights)
        assert len({windows.length for windows in self.windows}) == 1
        shares(self.weights)

    def locate(self, samples: npt.ArrayLike) -> tuple[Array, Array]:
        """For each global sample its source and the first token of its window there."""
        source, place = assign(samples, self.weights)
        starts = np.zeros_like(place)
        for number, windows in enumerate(self.windows):
            mine = source == number
            starts[mine] = windows.starts(place[mine])
        return source, starts

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been read once this many windows were served in all."""
        total = sum(parts := shares(self.weights))
        return [samples * part / total / windows.count for windows, part in zip(self.windows, parts, strict=True)]


# ---- random numbers by their place


def streams(samples: npt.ArrayLike, seed: int, purpose: int) -> Words:
    """A stream of random numbers for each sample, one for each purpose: (samples,). Purposes 1 and 2 are taken here."""
    return _hash(np.asarray(samples).astype(np.uint64), _key(seed, purpose))


def draw(streams: Words, places: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Numbers from 0 to below 1, those at `places` of `streams`, which are broadcast together.

    The generator is SplitMix64 (Steele et al. 2014). It counts, so that any number is had without those before it.
    """
    bits = _hash(np.asarray(places).astype(np.uint64), streams) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


# ---- a keyed permutation


def permute(index: Array, count: int, epoch: Array, seed: int) -> Array:
    """Where a random order of `count` things, one for each (seed, epoch), puts each index: a bijection on 0…count-1."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)  # bits of each half of a Feistel word
    keys = _hash(epoch.astype(np.uint64), _key(seed, 2))
    word = np.atleast_1d(_feistel(np.atleast_1d(index).astype(np.uint64), half, np.atleast_1d(keys)))
    keys = np.broadcast_to(np.atleast_1d(keys), word.shape)
    while (outside := word >= count).any():  # the domain is at most four times as large: walk on until inside
        word[outside] = _feistel(word[outside], half, keys[outside])
    return word.astype(np.int64).reshape(np.shape(index))


def _feistel(word: Words, half: int, keys: Words) -> Words:
    """Splits words of 2 × `half` bits and mixes each half into the other, round by round; invertible by design."""
    mask = np.uint64((1 << half) - 1)
    left, right = word >> np.uint64(half), word & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (_hash(right, keys + np.uint64(turn)) & mask)
    return (left << np.uint64(half)) | right


def _key(seed: int, purpose: int) -> Words:
    return _hash(np.array([seed % 2**64], dtype=np.uint64), np.array([purpose], dtype=np.uint64))


def _hash(word: Words, key: Words) -> Words:
    """SplitMix64's finalizer (Steele et al. 2014) on a word and a key; arithmetic is modulo 2^64."""
    mixed = np.atleast_1d(word) * np.uint64(0x9E3779B97F4A7C15) + np.atleast_1d(key) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
