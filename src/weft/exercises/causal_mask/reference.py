"""The causal mask and the shifted targets."""

import math
from typing import Any

import torch
from torch import Tensor


def causal_mask(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and targets, (batch, T) each, and the mask (T, T)."""
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    T = inputs.shape[1]
    full = torch.full((T, T), -math.inf, dtype=torch.float64)
    mask = torch.triu(full, diagonal=1)
    return inputs, targets, mask


def cases(draw: Any) -> Any:
    yield "random", {"tokens": draw.integers(0, 50, 2, 6)}
    yield "batch 1, length 1", {"tokens": draw.integers(0, 9, 1, 2)}
    yield "longer", {"tokens": draw.integers(0, 9, 3, 11)}
    yield "two tokens to predict", {"tokens": draw.integers(0, 9, 4, 3)}
