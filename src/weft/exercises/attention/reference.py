"""Scaled dot-product attention."""

import math
from typing import Any

import torch
from torch import Tensor


def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(QKᵀ/√d_k)V, (batch, T, d_v); True in `mask` allows a query to see a key."""
    d_k = Q.shape[-1]
    scores = Q @ K.mT / math.sqrt(d_k)
    A = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    output = A @ V
    return output


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, S: int, scale: float = 1.0) -> dict[str, Tensor]:
        mask = draw.uniform(B, T, S) < 0.6
        mask[..., 0] = True
        return {
            "Q": draw.normal(B, T, 8, scale=scale),
            "K": draw.normal(B, S, 8),
            "V": draw.normal(B, S, 3),
            "mask": mask,
        }

    yield "random", arguments(2, 4, 5)
    yield "batch 1, length 1", arguments(1, 1, 1)
    yield "large scores", arguments(2, 3, 3, 1000.0)
    one = arguments(1, 3, 3)
    yield "everything masked but one", one | {"mask": torch.eye(3, dtype=torch.bool)[None]}
    yield "nothing masked", one | {"mask": torch.ones(1, 3, 3, dtype=torch.bool)}
