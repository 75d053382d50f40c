"""Flash attention's running softmax."""

import math
from typing import Any

import torch
from torch import Tensor


def flash(Q: Tensor, K: Tensor, V: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return softmax(QKᵀ/√d)V, (T, d_v), and the log-sum-exp of each row of scores, (T,)."""
    m = Q.new_full((len(Q), 1), -math.inf)
    l = Q.new_zeros(len(Q), 1)
    O = Q.new_zeros(len(Q), V.shape[-1])
    for K_j, V_j in zip(K.split(block), V.split(block), strict=True):
        S = Q @ K_j.T / math.sqrt(Q.shape[-1])
        new = torch.maximum(m, S.amax(dim=-1, keepdim=True))
        shrink = torch.exp(m - new)
        P = torch.exp(S - new)
        l = shrink * l + P.sum(dim=-1, keepdim=True)
        O = shrink * O + P @ V_j
        m = new
    output = O / l
    lse = (m + l.log())[:, 0]
    return output, lse


def cases(draw: Any) -> Any:
    def arguments(T: int, S: int, block: int, scale: float = 1.0) -> dict[str, Any]:
        return {"Q": draw.normal(T, 4, scale=scale), "K": draw.normal(S, 4), "V": draw.normal(S, 3), "block": block}

    yield "random", arguments(3, 8, 3)
    yield "one key, one query", arguments(1, 1, 4)
    yield "one block", arguments(2, 5, 8)
    yield "blocks of one key", arguments(2, 6, 1)
    rising = arguments(2, 6, 2)
    yield (
        "the largest score comes last",
        rising | {"Q": rising["Q"].abs(), "K": rising["K"].abs() * torch.arange(1, 7)[:, None]},
    )
    yield "large scores", arguments(2, 7, 3, 1000.0)
    negative = arguments(2, 5, 2, 1000.0)
    yield "very negative scores", negative | {"Q": -negative["Q"].abs(), "K": negative["K"].abs() + 1}
