"""An Elman network, step by step."""

from typing import Any

import torch
from torch import Tensor


def elman(x: Tensor, W_ah: Tensor, W_ax: Tensor, b_a: Tensor, W_yh: Tensor, b_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distributions y (batch, T, V) of all steps, and the last state h (batch, d_h)."""
    h = x.new_zeros(len(x), len(b_a))
    ys = []
    for t in range(x.shape[1]):
        a = h @ W_ah.T + x[:, t] @ W_ax.T + b_a
        h = torch.sigmoid(a)
        ys.append((h @ W_yh.T + b_y).softmax(dim=-1))
    y = torch.stack(ys, dim=1)
    return y, h


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, d_x: int = 3, d_h: int = 4, V: int = 5) -> dict[str, Tensor]:
        return {
            "x": draw.normal(B, T, d_x), "W_ah": draw.normal(d_h, d_h), "W_ax": draw.normal(d_h, d_x),
            "b_a": draw.normal(d_h), "W_yh": draw.normal(V, d_h), "b_y": draw.normal(V),
        }  # fmt: skip

    yield "random", arguments(2, 4)
    yield "batch 1, length 1", arguments(1, 1)
    yield "a longer text", arguments(3, 9)
    yield "large inputs", (large := arguments(2, 3)) | {"x": 100 * large["x"]}
