"""Correct answers to the exercise mle in other manners."""

# mypy: ignore-errors
from collections import Counter, defaultdict
from fractions import Fraction


def counters(texts, N):
    pairs = Counter(tuple(text[i : i + N]) for text in texts for i in range(len(text) - N + 1))
    totals = Counter()
    for gram, c in pairs.items():
        totals[gram[:-1]] += c
    result = {}
    for gram, c in pairs.items():
        result.setdefault(gram[:-1], {})[gram[-1]] = c / totals[gram[:-1]]
    return result


def windows(texts, N):
    dice = defaultdict(Counter)
    for text in texts:
        for gram in zip(*(text[i:] for i in range(N)), strict=False):
            dice[gram[:-1]][gram[-1]] += 1
    return {h: {w: die[w] / die.total() for w in die} for h, die in dice.items()}


def fractions(texts, N):
    dice = {}
    for text in texts:
        for end in range(N - 1, len(text)):
            dice.setdefault(tuple(text[end - N + 1 : end]), []).append(text[end])
    return {h: {w: float(Fraction(ws.count(w), len(ws))) for w in set(ws)} for h, ws in dice.items()}
