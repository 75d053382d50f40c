"""Sinusoidal positions."""

from typing import Any

import torch
from torch import Tensor


def sinusoids(length: int, d: int) -> Tensor:
    """Return the encodings of positions 0 … length − 1, (length, d)."""
    t, k = torch.arange(length, dtype=torch.float64), torch.arange(d // 2, dtype=torch.float64)
    omega = 10000 ** (-2 * k / d)
    angle = t[:, None] * omega
    P = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
    return P


def cases(draw: Any) -> Any:
    yield "length 5, d 8", {"length": 5, "d": 8}
    yield "length 1", {"length": 1, "d": 4}
    yield "d 2", {"length": 3, "d": 2}
    yield "random", {"length": draw.random.randrange(2, 40), "d": 2 * draw.random.randrange(1, 20)}
    yield "the slide: d 4", {"length": 3, "d": 4}
