"""A split MLP and its two collectives."""

import math
from typing import Any

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def split_mlp(X: Tensor, A: Tensor, B: Tensor, g_Z: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    """Return Z = GeLU(XA)B and the gradient of X, computed in parts."""
    As, Bs = A.chunk(processes, dim=1), B.chunk(processes, dim=0)
    Ys, parts = [], []
    for r in range(processes):
        Y = gelu(X @ As[r])
        Ys.append(Y)
    Z = sum(Ys[r] @ Bs[r] for r in range(processes))
    for r in range(processes):
        g_Y = g_Z @ Bs[r].T
        parts.append((g_Y * gelu_slope(X @ As[r])) @ As[r].T)
    g_X = sum(parts)
    return Z, g_X  # type: ignore[return-value]


def cases(draw: Any) -> Any:
    def arguments(tokens: int, processes: int, d_model: int = 6, d_ff: int = 12) -> dict[str, Any]:
        return {
            "X": draw.normal(tokens, d_model), "A": draw.normal(d_model, d_ff, scale=0.5),
            "B": draw.normal(d_ff, d_model, scale=0.5), "g_Z": draw.normal(tokens, d_model), "processes": processes,
        }  # fmt: skip

    yield "two processes", arguments(4, 2)
    yield "one process", arguments(3, 1)
    yield "a process per column, one token", arguments(1, 12)
    yield "large inputs", (large := arguments(3, 3)) | {"X": 50 * large["X"]}
