"""Weighted sources: which one serves which sample, and how often each is read.

As the sampler, a pure function: the first n samples hold each source's share of n to within a window or two, at every
n, and the samples of one source are its windows 0, 1, 2 … in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import numpy.typing as npt

from weft.data.sampler import Array, Windows
from weft.errors import DataError

FINEST = 2**31  # shares are counted in parts of this at most, so that sample × share fits in 64 bits


def shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights as they are written: 0.6, 0.22 → 30, 11."""
    if not weights or min(weights) <= 0:
        raise DataError(f"weights {list(weights)}: a mixture needs one or more weights above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    total = sum(whole)
    return whole if total <= FINEST else [max(1, part * FINEST // total) for part in whole]


def assign(samples: npt.ArrayLike, weights: Sequence[float]) -> tuple[Array, Array]:
    """For each global sample its source, and the how-manieth sample of that source it is.

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
        return [windows.epoch(samples * part / total) for windows, part in zip(self.windows, parts, strict=True)]
