"""Chance that falls the same everywhere: a seeded generator that no version of Python changes.

SplitMix64 (Steele, Lea and Flood 2014): a counter in odd strides, and a mixer that leaves no trace of it.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]
Mine = Callable[[str], bool]  # does an item of this name belong to the side that is being drawn?

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


class Rng:
    """Numbers that look drawn at random, the same ones for the same seed."""

    def __init__(self, seed: str) -> None:
        self._state = int.from_bytes(sha256(seed.encode()).digest()[:8], "big")

    def below(self, bound: int) -> int:
        """One of 0 … bound − 1."""
        self._state = (self._state + _STRIDE) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """One of low … high."""
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of these."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` of these, no place twice, in any order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred cases."""
        return self.below(100) < percent
