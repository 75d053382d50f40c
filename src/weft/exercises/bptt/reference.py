"""Back-propagation through time."""

from typing import Any

import torch
from torch import Tensor


def bptt(x: Tensor, h0: Tensor, W: Tensor, U: Tensor, g_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W (d_h, d_h), U (d_h, d_x) and h_0 (batch, d_h); g_h is that of each state."""
    states = [h0]
    for t in range(x.shape[1]):
        h = torch.tanh(states[-1] @ W.T + x[:, t] @ U.T)
        states.append(h)
    g_W, g_U, later = torch.zeros_like(W), torch.zeros_like(U), torch.zeros_like(h0)
    for t in reversed(range(x.shape[1])):
        g_a = (g_h[:, t] + later) * (1 - states[t + 1] ** 2)
        g_W = g_W + g_a.T @ states[t]
        g_U = g_U + g_a.T @ x[:, t]
        later = g_a @ W
    g_h0 = later
    return g_W, g_U, g_h0


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, d_x: int = 3, d_h: int = 4) -> dict[str, Tensor]:
        return {
            "x": draw.normal(B, T, d_x), "h0": draw.normal(B, d_h), "W": draw.normal(d_h, d_h, scale=0.5),
            "U": draw.normal(d_h, d_x, scale=0.5), "g_h": draw.normal(B, T, d_h),
        }  # fmt: skip

    yield "random", arguments(2, 4)
    yield "batch 1, length 1", arguments(1, 1)
    yield "a longer text", arguments(2, 12)
    last = arguments(2, 5)
    yield "loss at the last step only", last | {"g_h": last["g_h"] * (torch.arange(5) == 4)[None, :, None]}
