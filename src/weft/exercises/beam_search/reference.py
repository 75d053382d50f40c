"""Beam search with a length penalty."""

import math
from typing import Any

from torch import Tensor


def beam_search(
    first: Tensor, following: Tensor, end: int, width: int, max_length: int, alpha: float
) -> tuple[list[int], float]:
    """Return the finished text of highest score, and its score."""
    beam: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for step in range(1, max_length + 1):
        candidates: list[tuple[list[int], float]] = []
        for text, log_p in beam:
            row = (following[text[-1]] if text else first).tolist()
            candidates += [([*text, token], log_p + row[token]) for token in range(len(row))]
        finished += [(text, log_p) for text, log_p in candidates if text[-1] == end or step == max_length]
        beam = [(text, log_p) for text, log_p in candidates if text[-1] != end]
        beam = sorted(beam, key=lambda each: (-each[1], each[0]))[:width]
    scored = [(text, log_p / ((5 + len(text)) / 6) ** alpha) for text, log_p in finished]
    best, score = max(scored, key=lambda each: (each[1], [-token for token in each[0]]))
    return best, score


def cases(draw: Any) -> Any:
    def arguments(V: int, width: int, max_length: int, alpha: float) -> dict[str, Any]:
        first, following = draw.probabilities(V).log(), draw.probabilities(V, V).log()
        return {
            "first": first,
            "following": following,
            "end": 0,
            "width": width,
            "max_length": max_length,
            "alpha": alpha,
        }

    yield "random", arguments(5, 3, 4, 0.6)
    yield "no penalty", arguments(4, 2, 5, 0.0)
    yield "greedy", arguments(6, 1, 4, 1.0)
    yield "one step", arguments(4, 3, 1, 0.6)
    yield "a wide beam", arguments(3, 20, 4, 2.0)
    tree = arguments(3, 2, 3, 0.6)
    p = [[0.9, 0.05, 0.05], [0.34, 0.33, 0.33], [0.97, 0.01, 0.02]]
    yield (
        "greedy misses",
        tree
        | {"first": tree["first"].new_tensor([0.01, 0.55, 0.44]).log(), "following": tree["first"].new_tensor(p).log()},
    )
    yield "long texts win", arguments(4, 4, 6, 5.0)
    p = [[0.05, 0.05, 0.9], [0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]
    ending = {
        "first": tree["first"].new_tensor([0.6, 0.39, 0.01]).log(),
        "following": tree["first"].new_tensor(p).log(),
    }
    yield "a likely end", tree | ending | {"width": 1, "max_length": 2, "alpha": 5.0}
