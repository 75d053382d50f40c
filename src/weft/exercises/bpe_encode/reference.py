"""Encode with BPE."""

from itertools import pairwise
from typing import Any


def merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    at = 0
    while at < len(pieces):
        joined = tuple(pieces[at : at + 2]) == pair
        merged.append("".join(pair) if joined else pieces[at])
        at += 2 if joined else 1
    return merged


def bpe_encode(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Return the pieces of a word."""
    pieces = list(word)
    while known := [pair for pair in pairwise(pieces) if pair in merges]:
        best = min(known, key=merges.index)
        pieces = merge(pieces, best)
    return pieces


def cases(draw: Any) -> Any:
    paper = [("e", "s"), ("es", "t"), ("l", "o"), ("lo", "w"), ("n", "e"), ("ne", "w"), ("new", "est"), ("w", "i")]
    yield "lowest", {"word": "lowest", "merges": paper}
    yield "newest", {"word": "newest", "merges": paper}
    yield "the order decides", {"word": "abcd", "merges": [("b", "c"), ("a", "b"), ("c", "d"), ("a", "bc")]}
    yield "repeated letters", {"word": "aaaaa", "merges": [("a", "a"), ("aa", "a")]}
    yield (
        "greedy would take the longest",
        {"word": "abcabd", "merges": [("a", "b"), ("b", "c"), ("c", "a"), ("ab", "c"), ("ab", "d")]},
    )
    yield "nothing known", {"word": "xyz", "merges": paper}
    yield "one letter", {"word": "a", "merges": [("a", "a")]}
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ("c", "a"), ("c", "c"), ("a", "a"), ("abc", "ab")]
    draw.random.shuffle(merges)
    yield "random", {"word": "".join(draw.random.choice("abc") for _ in range(12)), "merges": merges}
