"""Correct answers to the exercise bpe_encode in other manners."""

# mypy: ignore-errors
from itertools import pairwise


def ranks(word, merges):
    rank = {tuple(pair): i for i, pair in enumerate(merges)}
    pieces = list(word)
    while True:
        candidates = [(rank[pair], pair) for pair in pairwise(pieces) if pair in rank]
        if not candidates:
            return pieces
        pair = min(candidates)[1]
        i = 0
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == pair:
                pieces[i : i + 2] = ["".join(pair)]
            i += 1


def one_occurrence_at_a_time(word, merges):
    pieces = tuple(word)
    while len(pieces) > 1:
        found = [(merges.index(pair), at) for at, pair in enumerate(pairwise(pieces)) if pair in merges]
        if not found:
            break
        at = min(found)[1]
        pieces = (*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :])
    return pieces


def recursive(word, merges):
    def reduce(pieces):
        ranked = sorted(
            (merges.index((a, b)), a, b) for a, b in zip(pieces, pieces[1:], strict=False) if (a, b) in merges
        )
        if not ranked:
            return pieces
        _, a, b = ranked[0]
        out = []
        for piece in pieces:
            if out and out[-1] == (a,) and piece == b:
                out[-1] = (a + b, "joined")
            else:
                out.append((piece,))
        return reduce([each[0] for each in out])

    return reduce(list(word))
