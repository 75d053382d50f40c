"""Several heads."""

import math
from typing import Any

from torch import Tensor


def multi_head(x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor, heads: int) -> Tensor:
    """Return Concat(head_1, …, head_h) W_o, (batch, T, d_model)."""
    B, T, d_model = x.shape
    d_k = d_model // heads
    Q = (x @ W_q).unflatten(-1, (heads, d_k)).transpose(1, 2)
    K = (x @ W_k).unflatten(-1, (heads, d_k)).transpose(1, 2)
    V = (x @ W_v).unflatten(-1, (heads, d_k)).transpose(1, 2)
    A = (Q @ K.mT / math.sqrt(d_k)).softmax(dim=-1)
    concat = (A @ V).transpose(1, 2).reshape(B, T, -1)
    output = concat @ W_o
    return output


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, heads: int, d_model: int = 12) -> dict[str, Any]:
        matrices = {name: draw.normal(d_model, d_model, scale=0.5) for name in ("W_q", "W_k", "W_v", "W_o")}
        return {"x": draw.normal(B, T, d_model), **matrices, "heads": heads}

    yield "random", arguments(2, 4, 3)
    yield "batch 1, length 1", arguments(1, 1, 2)
    yield "one head", arguments(2, 3, 1)
    yield "as many heads as dimensions", arguments(1, 3, 12)
