"""The gates of an LSTM."""

from typing import Any

import torch
from torch import Tensor


def lstm(x: Tensor, h: Tensor, c: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next hidden state and the next cell, (batch, d_h) each."""
    a = torch.cat([x, h], dim=-1) @ W.T + b
    a_i, a_f, a_g, a_o = a.chunk(4, dim=-1)
    i = torch.sigmoid(a_i)
    f = torch.sigmoid(a_f)
    g = torch.tanh(a_g)
    o = torch.sigmoid(a_o)
    c_new = f * c + i * g
    h_new = o * torch.tanh(c_new)
    return h_new, c_new


def cases(draw: Any) -> Any:
    def arguments(B: int, d_x: int, d_h: int, scale: float = 1.0) -> dict[str, Tensor]:
        return {
            "x": draw.normal(B, d_x, scale=scale), "h": draw.normal(B, d_h), "c": draw.normal(B, d_h),
            "W": draw.normal(4 * d_h, d_x + d_h), "b": draw.normal(4 * d_h),
        }  # fmt: skip

    yield "random", arguments(3, 4, 5)
    yield "batch 1, width 1", arguments(1, 1, 1)
    yield "large inputs", arguments(2, 3, 4, 100.0)
    yield "a state of zeros", (zero := arguments(2, 3, 3)) | {"h": 0 * zero["h"], "c": 0 * zero["c"]}
