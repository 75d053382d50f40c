"""Rotary positions."""

from typing import Any

import torch
from torch import Tensor


def rotary(x: Tensor, m: Tensor, base: float) -> Tensor:
    """Return x (batch, T, d) with each pair of neighbours rotated by m θ_i."""
    d = x.shape[-1]
    theta = base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angle = m[:, None].to(x.dtype) * theta
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return rotated


def cases(draw: Any) -> Any:
    yield "random", {"x": draw.normal(2, 4, 6), "m": draw.integers(0, 50, 4), "base": 10000.0}
    yield "batch 1, length 1", {"x": draw.normal(1, 1, 2), "m": draw.integers(1, 9, 1), "base": 10000.0}
    yield "from position 100", {"x": draw.normal(2, 5, 8), "m": torch.arange(100, 105), "base": 10000.0}
    yield "another base", {"x": draw.normal(2, 3, 4), "m": torch.arange(3), "base": 500.0}
