"""Kneser–Ney bigrams."""

from itertools import pairwise
from typing import Any


def kneser_ney(words: list[str], v: str, w: str, D: float) -> float:
    """Return the interpolated Kneser–Ney probability p(w | v)."""
    pairs = list(pairwise(words))
    c = pairs.count((v, w))
    total = sum(a == v for a, b in pairs)
    followers = len({b for a, b in pairs if a == v})
    continuation = len({a for a, b in pairs if b == w}) / len(set(pairs))
    p = continuation
    if total:
        p = max(c - D, 0) / total + D * followers / total * continuation
    return p


def cases(draw: Any) -> Any:
    text = [
        "san",
        "francisco",
        "is",
        "far",
        "and",
        "san",
        "francisco",
        "is",
        "big",
        "and",
        "the",
        "city",
        "is",
        "far",
        "and",
        "the",
        "bay",
        "is",
        "big",
    ]
    yield "seen", {"words": text, "v": "san", "w": "francisco", "D": 0.75}
    yield "unseen after a seen word", {"words": text, "v": "the", "w": "francisco", "D": 0.75}
    yield "after an unknown word", {"words": text, "v": "rome", "w": "is", "D": 0.5}
    yield "frequent, but always after the same word", {"words": text, "v": "far", "w": "francisco", "D": 0.5}
    yield "after the last word, which no word follows there", {"words": text, "v": "big", "w": "and", "D": 0.75}
    letters = [draw.random.choice("abcd") for _ in range(30)]
    yield "random", {"words": letters, "v": draw.random.choice("abc"), "w": draw.random.choice("abcd"), "D": 0.6}
    yield "random, other words", {"words": letters, "v": letters[3], "w": letters[4], "D": 0.9}
