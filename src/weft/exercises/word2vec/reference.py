"""word2vec's loss."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def word2vec(v: Tensor, u: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, a scalar, and its gradient with respect to v, (d,)."""
    positive = F.logsigmoid(u @ v)
    negative = F.logsigmoid(-(negatives @ v)).sum()
    loss = -(positive + negative)
    g_v = (torch.sigmoid(u @ v) - 1) * u + torch.sigmoid(negatives @ v) @ negatives
    return loss, g_v


def cases(draw: Any) -> Any:
    def arguments(d: int, K: int, scale: float = 1.0) -> dict[str, Tensor]:
        return {"v": draw.normal(d, scale=scale), "u": draw.normal(d), "negatives": draw.normal(K, d)}

    yield "random", arguments(4, 5)
    yield "one dimension, one negative", arguments(1, 1)
    yield "no negatives", arguments(3, 0)
    yield "very unlikely", arguments(5, 3, 1000.0)
    yield "zeros", (zero := arguments(3, 2)) | {"v": 0 * zero["v"]}
