"""Which window of a text, or which examples, come at which step: a pure function of the seed, the step and the rank.

There is no state to save: resuming at step n costs nothing, and another number of processes shares out the same
windows in the same order. Within an epoch every window comes exactly once, in an order that is a keyed permutation
(a Feistel network with cycle walking, Black and Rogaway 2002), computed for the wanted indices alone.

A mixture has several texts with weights: of the first n samples each text has its share to within a window or two, at
every n, and the samples of one text are its windows 0, 1, 2 … in order.
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
ROUNDS = 6
MIXED = 4  # batches whose rows a cell mixes: more vary a row's company, fewer pad less
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
            needed = f"a window of {self.length} needs {self.length + 1}: add text or shorten batch.length"
            raise DataError(f"the text has {self.tokens} tokens, {needed}")

    @property
    def count(self) -> int:
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
            rows, need = f"{self.lanes} rows of {self.length} that continue each other", self.lanes * self.length + 1
            advice = "add text, or lower batch.size or batch.length"
            raise DataError(f"the text has {self.tokens} tokens, and {rows} need {need}: {advice}")

    @property
    def span(self) -> int:
        """Tokens that are a lane's own."""
        return (self.tokens - 1) // self.lanes

    @property
    def steps(self) -> int:
        return self.span // self.length

    def starts(self, step: int) -> Array:
        """The first tokens (lanes,) of the windows at `step`, counted from 0."""
        epoch, window = divmod(step, self.steps)
        hashed = int(_hash(np.array([epoch], dtype=np.uint64), _key(self.seed, 1))[0])
        shift = hashed % (self.span - self.steps * self.length + 1)
        return np.arange(self.lanes, dtype=np.int64) * self.span + shift + window * self.length

    def begins(self, step: int) -> bool:
        return step % self.steps == 0


def rows(step: int, batch: int, rank: int = 0, ranks: int = 1) -> Array:
    """The global samples that `rank` takes at `step`: its contiguous part of the batch's rows."""
    assert 0 <= rank < ranks <= batch, f"rank {rank} of {ranks}, batch {batch}"
    first = step * batch
    return np.arange(first + rank * batch // ranks, first + (rank + 1) * batch // ranks, dtype=np.int64)


def shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights as they are written: 0.6, 0.22 → 30, 11."""
    if not weights or min(weights) <= 0:
        raise DataError(f"weights {list(weights)}: a mixture needs one or more weights above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    total = sum(whole := [int(weight * scale) for weight in exact])
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


def streams(samples: npt.ArrayLike, seed: int, purpose: int) -> Words:
    """A stream of random numbers for each sample, one for each purpose: (samples,). Purposes 1 and 2 are taken here."""
    return _hash(np.asarray(samples).astype(np.uint64), _key(seed, purpose))


def draw(streams: Words, places: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Numbers from 0 to below 1, those at `places` of `streams`, which are broadcast together. The generator is
    SplitMix64 (Steele et al. 2014). It counts, so that any number is had without those before it."""
    bits = _hash(np.asarray(places).astype(np.uint64), streams) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


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


# ---- examples of like lengths together
#
# Examples are sorted into cells of like lengths once: the set is halved, again and again, along the side that would pad
# most, until a cell holds what a few batches do. An epoch shuffles each cell, cuts the line of all cells into batches,
# and shuffles the batches. Where it cuts follows from the longest lengths of the cells alone, so every epoch has as
# many steps, and the rows of any step are computed at once: resuming costs nothing.


class Buckets:
    """Batches of `size` rows, or of as many as fit into `tokens`, padding of all sides counted.

    lengths: (examples,) or (examples, sides), the tokens of each as they are batched, special tokens included.
    even: the last batches of an epoch have one size; weft 0.1 left its last one whatever was left.
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
            spelled = f"{' + '.join(map(str, sides))} = {sum(sides)}" if len(sides) > 1 else str(sides[0])
            found = f"example {longest} (counted from 0) has {spelled} tokens, more than batch.tokens = {tokens}"
            raise DataError(f"{found}: set it to {sum(sides)} or more, or shorten batch.length")
        count = len(self.lengths)
        shuffled = permute(np.arange(count), count, np.zeros(count, dtype=np.int64), seed)
        cells = list(_cells(self.lengths, shuffled, size, tokens))
        self._order = np.concatenate(cells)  # all examples, cell after cell
        self._starts = np.cumsum([0, *(len(cell) for cell in cells)])
        if size is not None:
            steps = -(-count // size)
            self._cuts = np.arange(steps + 1) * count // steps  # sizes differ by one at most
        else:
            assert tokens is not None
            bounds = np.stack([self.lengths[cell].max(axis=0) for cell in cells])
            self._cuts = _fill(bounds, self._starts, tokens)
            if even:
                self._cuts = _evened(self._cuts, bounds, self._starts, tokens)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._cuts) - 1

    @property
    def smallest(self) -> int:
        """The rows of the smallest batch: no more processes can share the steps."""
        return int(np.diff(self._cuts).min())

    def epoch(self, step: int) -> float:
        """How often all examples have been served when `step` begins."""
        return step / self.steps_per_epoch

    def rows(self, step: int, rank: int = 0, ranks: int = 1) -> Array:
        """The examples that `rank` takes at `step`: its contiguous part of the step's rows."""
        epoch, first, last = self._cut(step)
        if ranks > (held := last - first):
            raise DataError(f"step {step} has {held} rows for {ranks} processes; raise batch.tokens or batch.size")
        found = []
        cell = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:  # cell by cell
            start, stop = int(self._starts[cell]), int(self._starts[cell + 1])
            places = np.arange(first, min(last, stop)) - start
            turns = np.full(len(places), epoch)
            found.append(self._order[start + permute(places, stop - start, turns, self.seed + 7919 * (cell + 1))])
            first, cell = min(last, stop), cell + 1
        taken = np.concatenate(found)
        return taken[rank * len(taken) // ranks : (rank + 1) * len(taken) // ranks]

    def size(self, step: int) -> int:
        """How many examples all processes take at `step`."""
        _, first, last = self._cut(step)
        return last - first

    def _cut(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, and the places of its examples in that epoch's line."""
        epoch, place = divmod(step, self.steps_per_epoch)
        batch = int(permute(np.array([place]), self.steps_per_epoch, np.array([epoch]), self.seed)[0])
        return epoch, int(self._cuts[batch]), int(self._cuts[batch + 1])


def _cells(
    lengths: Array, rows: Array, size: int | None, tokens: int | None, backwards: bool = False
) -> Iterator[Array]:
    """Rows of like lengths: halved at the median of the side that would pad most, as in a k-d tree (Bentley 1975).
    Every other half is walked `backwards`, so that cells that follow each other are neighbours."""
    here = lengths[rows]
    longest = here.max(axis=0)
    padding = longest - here.mean(axis=0)  # of each side, were this one batch
    bound = int(longest.sum())
    batch = size if size is not None else max(1, (tokens or 0) // max(bound, 1))
    fits = tokens is None or bound <= tokens
    if len(rows) == 1 or (fits and (not padding.any() or len(rows) <= MIXED * batch)):
        yield rows
        return
    side = int(padding.argmax())
    ranked = rows[np.argsort(here[:, side], kind="stable")]
    halves = [ranked[: len(ranked) // 2], ranked[len(ranked) // 2 :]]
    for turn, half in enumerate(reversed(halves) if backwards else halves):
        yield from _cells(lengths, half, size, tokens, backwards=bool(turn))


def _fill(bounds: Array, starts: Array, tokens: int) -> Array:
    """Where batches are cut: each takes as many places as fit, at the longest lengths (cells, sides) of their cells."""
    cuts = [0]
    longest = np.zeros(bounds.shape[1], dtype=np.int64)
    for cell, bound in enumerate(bounds):
        at, stop = int(starts[cell]), int(starts[cell + 1])
        joined = np.maximum(longest, bound)
        if at > cuts[-1] and (at + 1 - cuts[-1]) * int(joined.sum()) > tokens:
            cuts.append(at)
        longest = joined if at > cuts[-1] else bound
        most = tokens // max(int(longest.sum()), 1)
        while stop - cuts[-1] > most:
            cuts.append(cuts[-1] + most)
            longest = bound  # the next batch begins inside this cell
            most = tokens // max(int(bound.sum()), 1)
    return np.array([*cuts, int(starts[-1])])


def _evened(cuts: Array, bounds: Array, starts: Array, tokens: int) -> Array:
    """The same number of batches, the last few of one size: what was left for the last might be a row or two, and its
    gradient noise, while its update is as large as any."""
    for count in range(min(MIXED, len(cuts) - 1), 1, -1):
        first, last = int(cuts[-1 - count]), int(cuts[-1])
        begins = int(np.searchsorted(starts, first, side="right")) - 1
        longest = int(bounds[begins:].max(axis=0).sum())
        if -(-(last - first) // count) * longest <= tokens:
            return np.concatenate([cuts[: -1 - count], first + np.arange(count + 1) * (last - first) // count])
    return cuts
