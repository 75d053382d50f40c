"""RMSNorm, forward and backward."""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float, g_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (rows, n), and the gradients of x (rows, n) and gain (n,)."""
    rms = torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    x_hat = x / rms
    y = x_hat * gain
    g_hat = g_y * gain
    g_x = (g_hat - x_hat * (g_hat * x_hat).mean(dim=-1, keepdim=True)) / rms
    g_gain = (g_y * x_hat).sum(dim=0)
    return y, g_x, g_gain


def cases(draw: Any) -> Any:
    def arguments(rows: int, n: int, scale: float = 1.0, eps: float = 1e-2) -> dict[str, Any]:
        return {"x": draw.normal(rows, n, scale=scale), "gain": draw.normal(n), "eps": eps, "g_y": draw.normal(rows, n)}

    yield "random", arguments(3, 5)
    yield "one row, one feature", arguments(1, 1)
    yield "large features", arguments(2, 4, 1000.0)
    yield "small eps", arguments(2, 6, eps=1e-6)
    yield "a row of zeros", (zero := arguments(2, 3)) | {"x": 0 * zero["x"]}
