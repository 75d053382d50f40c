import torch
from torch import Tensor


def sinusoids(length: int, d: int) -> Tensor:
    """Return the encodings of positions 0 … length − 1, (length, d)."""
    omega = ...  # ω_k = 1/10000^(2k/d), for k = 0 … d/2 − 1: (d/2,)
    angle = ...  # ω_k · t, for every position t: (length, d/2)
    P = ...  # sin(ω_k t) in column 2k and cos(ω_k t) in column 2k + 1: (length, d)
    return P
