"""A seeded random-number generator whose sequence is the same in every version of Python.

SplitMix64 (Steele, Lea and Flood 2014): a counter with an odd stride, and a function that mixes its bits.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]
InSplit = Callable[[str], bool]  # whether the item with this key belongs to the split that is drawn

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


class Rng:
    """Pseudo-random numbers that depend on the seed alone."""

    def __init__(self, seed: str) -> None:
        self._state = int.from_bytes(sha256(seed.encode()).digest()[:8], "big")

    def below(self, bound: int) -> int:
        """Return one of 0 … bound − 1."""
        self._state = (self._state + _STRIDE) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """Return one of low … high."""
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` options without replacement, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def chance(self, percent: int) -> bool:
        """Return True with a probability in percent."""
        return self.below(100) < percent
