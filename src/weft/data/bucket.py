"""Which examples come at which step, those of like lengths together: a pure function of the seed and the step.

Examples are sorted into cells of like lengths once: the set is halved, again and again, along the side that would pad
most, until a cell holds what a few batches do. An epoch shuffles each cell, cuts the line of all cells into batches,
and shuffles the batches. Where it cuts follows from the longest lengths of the cells alone, so every epoch has as many
steps, and the rows of any step are computed at once: resuming costs nothing.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weft.data.sampler import Array, permute
from weft.errors import DataError

MIXED = 4  # batches whose rows a cell mixes: more vary a row's company, fewer pad less


class Buckets:
    """Batches of `size` rows, or of as many as fit into `tokens`, padding of all sides counted.

    lengths: (examples,) or (examples, sides), the tokens of each as they are batched, special tokens included.
    """

    def __init__(
        self, lengths: npt.ArrayLike, *, size: int | None = None, tokens: int | None = None, seed: int = 0
    ) -> None:
        table = np.asarray(lengths, dtype=np.int64)
        self.lengths = table[:, None] if table.ndim == 1 else table
        self.seed = seed
        assert (size is None) != (tokens is None), "a batch has a size or a budget of tokens"
        assert self.lengths.ndim == 2
        if not len(self.lengths):
            raise DataError("there are no examples to batch")
        if tokens is not None:
            self._refuse_long(tokens)
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

    def _refuse_long(self, tokens: int) -> None:
        longest = int(self.lengths.sum(axis=1).argmax())
        sides = self.lengths[longest].tolist()
        if sum(sides) > tokens:
            spelled = f"{' + '.join(map(str, sides))} = {sum(sides)}" if len(sides) > 1 else str(sides[0])
            raise DataError(
                f"example {longest} (counted from 0) has {spelled} tokens, more than batch.tokens = {tokens}: "
                f"set it to {sum(sides)} or more, or shorten batch.length"
            )

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
        if ranks > last - first:
            raise DataError(
                f"step {step} has {last - first} rows for {ranks} processes; raise batch.tokens or batch.size"
            )
        taken = np.concatenate(list(self._cell_rows(first, last, epoch)))
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

    def _cell_rows(self, first: int, last: int, epoch: int) -> Iterator[Array]:
        """The examples at places `first` … `last` of an epoch's line, cell by cell."""
        cell = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:
            start, stop = int(self._starts[cell]), int(self._starts[cell + 1])
            places = np.arange(first, min(last, stop)) - start
            turns = np.full(len(places), epoch)
            yield self._order[start + permute(places, stop - start, turns, self.seed + 7919 * (cell + 1))]
            first, cell = min(last, stop), cell + 1


def _cells(
    lengths: Array, rows: Array, size: int | None, tokens: int | None, backwards: bool = False
) -> Iterator[Array]:
    """Rows of like lengths: halved at the median of the side that would pad most, as in a k-d tree (Bentley 1975).

    Every other half is walked `backwards`, so that cells that follow each other are neighbours.
    """
    here = lengths[rows]
    longest = here.max(axis=0)
    padding = longest - here.mean(axis=0)  # of each side, were this one batch
    bound = int(longest.sum())
    batch = size if size is not None else max(1, (tokens or 0) // max(bound, 1))
    alike = not padding.any()
    fits = tokens is None or bound <= tokens
    if len(rows) == 1 or (fits and (alike or len(rows) <= MIXED * batch)):
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
