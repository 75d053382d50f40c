"""Samplers: the windows of text, or the examples, of a step as a pure function of the seed, the step and the rank.

There is no state to save: resuming at step n costs nothing, and any number of processes shares the same windows in the
same order. Within an epoch every window is sampled exactly once. The order is a keyed permutation (a Feistel network
with cycle walking, Black and Rogaway 2002), computed only for the indices in use.

A mixture has several texts with weights: for every n, the first n samples contain each text's share to within a window
or two, and the samples of one text are its windows 0, 1, 2 … in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from weft.errors import DataError

Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Streams = npt.NDArray[np.uint64]  # keys of random-number streams
ROUNDS = 6  # of the Feistel network
MIXED = 4  # batches per cell of `Buckets`: more mix rows more widely, fewer pad less
MAX_SHARES = 2**31  # sum of the integer weights of a mixture, so that sample × share fits in 64 bits


@dataclass(frozen=True)
class Windows:
    """Windows of `length` inputs and their targets over a text of `tokens`; each epoch shifts them by less than one."""

    tokens: int
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < self.length + 1:
            needed = f"a window of {self.length} needs {self.length + 1}: add text or shorten batch.length"
            raise DataError(f"the text has {self.tokens} tokens, {needed}")

    @property
    def count(self) -> int:
        return max(1, (self.tokens - self.length) // self.length)

    def starts(self, samples: npt.ArrayLike) -> Array:
        """Offsets of the first tokens of these global samples. Sample 0 is the first row of step 0."""
        epoch, index = np.divmod(np.asarray(samples, dtype=np.int64), self.count)
        slack = min(self.length - 1, self.tokens - 1 - self.count * self.length)
        shift = _hash(epoch.astype(np.uint64), _key(self.seed, 1)) % np.uint64(slack + 1)
        return permute(index, self.count, epoch, seed=self.seed) * self.length + shift.astype(np.int64)


@dataclass(frozen=True)
class Lanes:
    """A text divided into `lanes` that are read in parallel; each step continues `length` tokens after the previous.

    A recurrent model can carry its state along (truncated back-propagation through time; Werbos 1990, Mikolov et al.
    2010). Every epoch restarts all lanes, shifted by less than a window. If `varied`, each epoch also draws where its
    windows end, so that gradients reach back to other tokens (Merity et al. 2018, §5).
    """

    tokens: int
    length: int
    lanes: int
    seed: int = 0
    varied: bool = False

    def __post_init__(self) -> None:
        if not self.steps:
            rows, need = f"{self.lanes} rows of {self.length} that continue each other", self.lanes * self.length + 1
            advice = "add text, or lower batch.size or batch.length"
            raise DataError(f"the text has {self.tokens} tokens, and {rows} need {need}: {advice}")

    @property
    def span(self) -> int:
        """Number of tokens in a lane."""
        return (self.tokens - 1) // self.lanes

    @property
    def steps(self) -> int:
        return self.span // self.length

    def starts(self, step: int) -> Array:
        """Offsets of the first tokens (lanes,) of the windows at `step`, counted from 0."""
        epoch, window = divmod(step, self.steps)
        hashed = int(_hash(np.array([epoch], dtype=np.uint64), _key(self.seed, 1))[0])
        shift = hashed % (self.span - self.steps * self.length + 1)
        return np.arange(self.lanes, dtype=np.int64) * self.span + shift + self._end(epoch, window)

    def width(self, step: int) -> int:
        """Return the length of the windows at `step`: `length`, or up to two sevenths more or less if `varied`."""
        epoch, window = divmod(step, self.steps)
        return self._end(epoch, window + 1) - self._end(epoch, window)

    def _end(self, epoch: int, windows: int) -> int:
        """Return the tokens of a lane in the first `windows` of an epoch. Their lengths are few, because a GPU captures
        a graph for each."""
        moved = 0
        if self.varied and 0 < windows < self.steps:
            hashed = _hash(np.array([windows], dtype=np.uint64), streams([epoch], self.seed, 3))
            moved = (int(hashed[0] % np.uint64(5)) - 2) * (self.length // 14)
        return windows * self.length + moved

    def begins(self, step: int) -> bool:
        """Return whether an epoch begins at `step`."""
        return step % self.steps == 0


def rank_samples(step: int, batch: int, *, rank: int = 0, ranks: int = 1) -> Array:
    """Global sample numbers of `rank` at `step`: its contiguous part of the batch's rows."""
    assert 0 <= rank < ranks <= batch, f"rank {rank} of {ranks}, batch {batch}"
    first = step * batch
    return np.arange(first + rank * batch // ranks, first + (rank + 1) * batch // ranks, dtype=np.int64)


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Integers in the exact proportion of the weights' decimal notation: 0.6, 0.22 → 30, 11."""
    if not weights or min(weights) <= 0:
        raise DataError(f"weights {list(weights)}: a mixture needs one or more weights above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    total = sum(shares := [int(weight * scale) for weight in exact])
    return shares if total <= MAX_SHARES else [max(1, share * MAX_SHARES // total) for share in shares]


def assign(samples: npt.ArrayLike, weights: Sequence[float]) -> tuple[Array, Array]:
    """Assign each global sample to a source; return the sources and each sample's index within its source.

    The first source takes its share evenly out of all samples, the second its share of those left, and so on: of the
    first n samples, a share of a/b takes exactly ⌊n·a/b⌋.
    """
    left = np.asarray(samples, dtype=np.int64).copy()  # index of the sample among those not yet taken by a source
    source = np.full(left.shape, len(weights) - 1, dtype=np.int64)
    index = np.zeros_like(left)
    shares = integer_shares(weights)
    free = np.ones(left.shape, dtype=bool)
    for number, share in enumerate(shares):
        total = sum(shares[number:])
        before = left * share // total
        taken = free & ((left + 1) * share // total > before)
        source[taken] = number
        index[taken] = before[taken]
        free &= ~taken
        left = left - before
    return source, index


@dataclass(frozen=True)
class Mixture:
    """Windows of several texts, sampled in the proportion of their weights."""

    windows: tuple[Windows, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.windows) == len(self.weights)
        assert len({windows.length for windows in self.windows}) == 1
        integer_shares(self.weights)

    def locate(self, samples: npt.ArrayLike) -> tuple[Array, Array]:
        """Source of each global sample and the offset of its window's first token there."""
        source, index = assign(samples, self.weights)
        starts = np.zeros_like(index)
        for number, windows in enumerate(self.windows):
            rows = source == number
            starts[rows] = windows.starts(index[rows])
        return source, starts

    def epochs(self, samples: int) -> list[float]:
        """Epochs of each source after this many samples of the mixture."""
        total = sum(shares := integer_shares(self.weights))
        return [samples * share / total / windows.count for windows, share in zip(self.windows, shares, strict=True)]


def streams(samples: npt.ArrayLike, seed: int, purpose: int) -> Streams:
    """Random-number streams, one for each sample, independent for each purpose: (samples,). This module uses purposes
    1 to 3."""
    return _hash(np.asarray(samples).astype(np.uint64), _key(seed, purpose))


def draw(streams: Streams, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) at `positions` of `streams`, broadcast together. The generator is SplitMix64 (Steele et
    al. 2014), which is counter-based: any number can be drawn without those before it."""
    bits = _hash(np.asarray(positions).astype(np.uint64), streams) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def permute(index: Array, count: int, epoch: Array, *, seed: int) -> Array:
    """Map indices by a random permutation of 0 … count-1, one for each (seed, epoch)."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)  # bits of each half of a Feistel word
    keys = _hash(epoch.astype(np.uint64), _key(seed, 2))
    word = np.atleast_1d(_feistel(np.atleast_1d(index).astype(np.uint64), half, np.atleast_1d(keys)))
    keys = np.broadcast_to(np.atleast_1d(keys), word.shape)
    while (outside := word >= count).any():  # cycle walking: the domain is at most four times as large
        word[outside] = _feistel(word[outside], half, keys[outside])
    return word.astype(np.int64).reshape(np.shape(index))


def _feistel(word: Words, half: int, keys: Words) -> Words:
    """Feistel network on words of 2 × `half` bits; a bijection."""
    mask = np.uint64((1 << half) - 1)
    left, right = word >> np.uint64(half), word & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_hash(right, keys + np.uint64(number)) & mask)
    return (left << np.uint64(half)) | right


def _key(seed: int, purpose: int) -> Words:
    return _hash(np.array([seed % 2**64], dtype=np.uint64), np.array([purpose], dtype=np.uint64))


def _hash(word: Words, key: Words) -> Words:
    """SplitMix64's finalizer (Steele et al. 2014) on a word and a key; arithmetic is modulo 2^64."""
    mixed = np.atleast_1d(word) * np.uint64(0x9E3779B97F4A7C15) + np.atleast_1d(key) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


# ---- batches of examples of similar length
#
# Examples are sorted once into cells of similar length: the set is halved recursively along the side that would be
# padded most, until a cell holds a few batches. An epoch shuffles each cell, cuts the sequence of all cells into
# batches, and shuffles the batches. The cuts follow from the maximum lengths of the cells alone, so every epoch has the
# same number of steps, and the rows of any step are computed directly: resuming costs nothing.


class Buckets:
    """Batches of `size` rows, or of as many rows as fit into `tokens`, of lengths (examples,) or (examples, sides).

    even: the last batches of an epoch have equal sizes; in weft 0.1, the last one had the remaining rows.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        size: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
        even: bool = True,
    ) -> None:
        table = np.asarray(lengths, dtype=np.int64)
        self.lengths = table[:, None] if table.ndim == 1 else table
        self.seed = seed
        assert (size is None) != (tokens is None), "a batch has a size or a budget of tokens"
        assert self.lengths.ndim == 2
        if not len(self.lengths):
            raise DataError("there are no examples to batch")
        longest = int(self.lengths.sum(axis=1).argmax())
        sides = self.lengths[longest].tolist()
        if tokens is not None and sum(sides) > tokens:
            total = f"{' + '.join(map(str, sides))} = {sum(sides)}" if len(sides) > 1 else str(sides[0])
            found = f"example {longest} (counted from 0) has {total} tokens, more than batch.tokens = {tokens}"
            raise DataError(f"{found}: set it to {sum(sides)} or more, or shorten batch.length")
        count = len(self.lengths)
        shuffled = permute(np.arange(count), count, np.zeros(count, dtype=np.int64), seed=seed)
        cells = list(_cells(self.lengths, shuffled, size=size, tokens=tokens))
        self._order = np.concatenate(cells)  # all examples, cell by cell
        self._starts = np.cumsum([0, *(len(cell) for cell in cells)])
        if size is not None:
            steps = -(-count // size)
            self._cuts = np.arange(steps + 1) * count // steps  # sizes differ by at most one
        else:
            assert tokens is not None
            max_lengths = np.stack([self.lengths[cell].max(axis=0) for cell in cells])
            self._cuts = _cut_batches(max_lengths, self._starts, tokens)
            if even:
                self._cuts = _even_out(self._cuts, max_lengths, self._starts, tokens=tokens)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._cuts) - 1

    @property
    def smallest(self) -> int:
        """Rows of the smallest batch, which bounds the number of processes."""
        return int(np.diff(self._cuts).min())

    def epoch(self, step: int) -> float:
        """Number of epochs completed when `step` begins."""
        return step / self.steps_per_epoch

    def rows(self, step: int, rank: int = 0, ranks: int = 1) -> Array:
        """Indices of the examples of `rank` at `step`: its contiguous part of the step's rows."""
        epoch, first, last = self._bounds(step)
        if ranks > (size := last - first):
            raise DataError(f"step {step} has {size} rows for {ranks} processes; raise batch.tokens or batch.size")
        parts = []
        cell = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:  # cell by cell
            start, stop = int(self._starts[cell]), int(self._starts[cell + 1])
            index = np.arange(first, min(last, stop)) - start
            seed = self.seed + 7919 * (cell + 1)
            parts.append(self._order[start + permute(index, stop - start, np.full(len(index), epoch), seed=seed)])
            first, cell = min(last, stop), cell + 1
        rows = np.concatenate(parts)
        return rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]

    def size(self, step: int) -> int:
        """Number of examples that all processes together take at `step`."""
        _, first, last = self._bounds(step)
        return last - first

    def _bounds(self, step: int) -> tuple[int, int, int]:
        """Epoch of a step, and the half-open range of its examples in that epoch's order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        batch = int(permute(np.array([index]), self.steps_per_epoch, np.array([epoch]), seed=self.seed)[0])
        return epoch, int(self._cuts[batch]), int(self._cuts[batch + 1])


def _cells(
    lengths: Array, rows: Array, *, size: int | None, tokens: int | None, backwards: bool = False
) -> Iterator[Array]:
    """Yield rows of similar length, halved at the median of the side with most padding, as in a k-d tree (Bentley
    1975). Every other half is walked `backwards`, so that consecutive cells are neighbours."""
    sides = lengths[rows]
    longest = sides.max(axis=0)
    padding = longest - sides.mean(axis=0)  # of each side, if all rows were one batch
    row_tokens = int(longest.sum())
    batch = size if size is not None else max(1, (tokens or 0) // max(row_tokens, 1))
    fits = tokens is None or row_tokens <= tokens
    if len(rows) == 1 or (fits and (not padding.any() or len(rows) <= MIXED * batch)):
        yield rows
        return
    ranked = rows[np.argsort(sides[:, int(padding.argmax())], kind="stable")]
    halves = [ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]]
    for number, half in enumerate(reversed(halves) if backwards else halves):
        yield from _cells(lengths, half, size=size, tokens=tokens, backwards=bool(number))


def _cut_batches(max_lengths: Array, starts: Array, tokens: int) -> Array:
    """Offsets at which to cut batches: each holds as many rows as fit into `tokens` when they are padded to the maximum
    lengths (cells, sides) of their cells."""
    cuts = [0]
    longest = np.zeros(max_lengths.shape[1], dtype=np.int64)
    for cell, cell_longest in enumerate(max_lengths):
        start, stop = int(starts[cell]), int(starts[cell + 1])
        joined = np.maximum(longest, cell_longest)
        if start > cuts[-1] and (start + 1 - cuts[-1]) * int(joined.sum()) > tokens:
            cuts.append(start)
        longest = joined if start > cuts[-1] else cell_longest
        max_rows = tokens // max(int(longest.sum()), 1)
        while stop - cuts[-1] > max_rows:
            cuts.append(cuts[-1] + max_rows)
            longest = cell_longest  # the next batch begins inside this cell
            max_rows = tokens // max(int(cell_longest.sum()), 1)
    return np.array([*cuts, int(starts[-1])])


def _even_out(cuts: Array, max_lengths: Array, starts: Array, *, tokens: int) -> Array:
    """Give the last few batches equal sizes, keeping their number. Otherwise the last batch might have a row or two: a
    noisy gradient, but a full-sized update."""
    for count in range(min(MIXED, len(cuts) - 1), 1, -1):
        first, last = int(cuts[-1 - count]), int(cuts[-1])
        cell = int(np.searchsorted(starts, first, side="right")) - 1
        longest = int(max_lengths[cell:].max(axis=0).sum())
        if -(-(last - first) // count) * longest <= tokens:
            return np.concatenate([cuts[: -1 - count], first + np.arange(count + 1) * (last - first) // count])
    return cuts
