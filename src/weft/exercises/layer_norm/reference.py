"""LayerNorm, forward and backward."""

from typing import Any

import torch
from torch import Tensor


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float, g_y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (rows, n), and the gradients of x (rows, n), gain (n,) and bias (n,)."""
    mu = x.mean(dim=-1, keepdim=True)
    sigma = torch.sqrt((x - mu).square().mean(dim=-1, keepdim=True) + eps)
    x_hat = (x - mu) / sigma
    y = gain * x_hat + bias
    g_hat = g_y * gain
    g_x = (g_hat - g_hat.mean(dim=-1, keepdim=True) - x_hat * (g_hat * x_hat).mean(dim=-1, keepdim=True)) / sigma
    g_gain = (g_y * x_hat).sum(dim=0)
    g_bias = g_y.sum(dim=0)
    return y, g_x, g_gain, g_bias


def cases(draw: Any) -> Any:
    def arguments(rows: int, n: int, scale: float = 1.0, eps: float = 1e-2) -> dict[str, Any]:
        x = draw.normal(rows, n, scale=scale)
        return {"x": x, "gain": draw.normal(n), "bias": draw.normal(n), "eps": eps, "g_y": draw.normal(rows, n)}

    yield "random", arguments(3, 5)
    yield "one row", arguments(1, 6)
    yield "features of very different size", arguments(4, 4, 1000.0)
    yield "small eps", arguments(2, 8, eps=1e-5)
    equal = arguments(2, 4)
    yield "all features equal", equal | {"x": torch.ones(2, 4, dtype=torch.float64)}
