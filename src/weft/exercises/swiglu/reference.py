"""SwiGLU."""

from typing import Any

import torch
from torch import Tensor


def swiglu(x: Tensor, W_g: Tensor, W_u: Tensor, W_d: Tensor) -> Tensor:
    """Return (Swish(x W_g) ⊙ x W_u) W_d, (batch, T, d)."""
    z = x @ W_g
    gate = z * torch.sigmoid(z)
    up = x @ W_u
    output = (gate * up) @ W_d
    return output


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, d: int, d_ff: int, scale: float = 1.0) -> dict[str, Tensor]:
        matrices = {"W_g": draw.normal(d, d_ff), "W_u": draw.normal(d, d_ff), "W_d": draw.normal(d_ff, d)}
        return {"x": draw.normal(B, T, d, scale=scale), **matrices}

    yield "random", arguments(2, 3, 4, 6)
    yield "batch 1, length 1", arguments(1, 1, 2, 1)
    yield "large inputs", arguments(2, 2, 3, 5, 1000.0)
    yield "zeros", (zero := arguments(1, 2, 3, 4)) | {"x": 0 * zero["x"]}
