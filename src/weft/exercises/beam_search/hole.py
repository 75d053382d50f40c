import math

import torch
from torch import Tensor


def beam_search(
    first: Tensor, following: Tensor, end: int, width: int, max_length: int, alpha: float
) -> tuple[list[int], float]:
    """Return the finished text of highest score, and its score."""
    candidates = ...  # every prefix of the beam continued by every token, with its log p
    beam = ...  # of the unfinished candidates the `width` most likely; of equally likely ones the smallest list
    score = ...  # log p / ((5 + length)/6)^alpha, where the length counts `end`
    best = ...  # the finished text of highest score; finished is what ends with `end`, or has max_length tokens
    return best, score
