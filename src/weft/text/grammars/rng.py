"""Chance that falls the same everywhere: a seeded generator that no version of Python changes.

SplitMix64 (Steele, Lea and Flood 2014): a counter in odd strides, and a mixer that leaves no trace of it.
"""

import tomllib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
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


def words(text: str) -> tuple[str, ...]:
    """The words of a list that is written as a text."""
    return tuple(text.split())


def load(grammar: str) -> dict[str, Any]:
    """The word lists and patterns of a grammar, from the file beside its code."""
    return tomllib.loads(Path(__file__).with_name(f"{grammar}.toml").read_text(encoding="utf-8"))


def an(word: str) -> str:
    """A word with its indefinite article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def in_validation(task: str, key: str) -> bool:
    """Is the item that `key` names held out? One in ten is, and which ones never changes."""
    return int.from_bytes(sha256(f"{task}\0{key}".encode()).digest()[:8], "big") % 10 == 0
