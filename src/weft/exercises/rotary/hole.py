import torch
from torch import Tensor


def rotary(x: Tensor, m: Tensor, base: float) -> Tensor:
    """Return x (batch, T, d) with each pair of neighbours rotated by m θ_i."""
    theta = ...  # θ_i = base^(−2i/d), for i = 0 … d/2 − 1: (d/2,)
    angle = ...  # m θ_i, one angle per pair: (T, d/2)
    rotated = ...  # each pair (x_{2i}, x_{2i+1}) rotated: (x_{2i} cos − x_{2i+1} sin, x_{2i} sin + x_{2i+1} cos)
    return rotated
