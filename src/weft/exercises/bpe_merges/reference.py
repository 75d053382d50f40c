"""Learn BPE's merges."""

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


def bpe_merges(words: dict[str, int], count: int) -> list[tuple[str, str]]:
    """Return the first `count` pairs that are merged, in order."""
    pieces = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for word in pieces:
            count_of = words[word]
            for pair in pairwise(pieces[word]):
                pairs[pair] = pairs.get(pair, 0) + count_of
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in pieces:
            pieces[word] = merge(pieces[word], best)
    return merges


def cases(draw: Any) -> Any:
    yield "the paper", {"words": {"low": 5, "lower": 2, "newest": 6, "widest": 3}, "count": 8}
    yield "ties", {"words": {"ba": 2, "ab": 2, "cd": 1}, "count": 2}
    yield "repeated letters", {"words": {"aaaa": 3, "aab": 1}, "count": 3}
    yield "one letter", {"words": {"a": 9}, "count": 4}
    yield "more merges than possible", {"words": {"abc": 1}, "count": 10}
    words = {"".join(draw.random.choice("abc") for _ in range(draw.random.randrange(1, 7))): 1 for _ in range(9)}
    yield "random", {"words": {word: draw.random.randrange(1, 6) for word in words}, "count": 6}
