"""Adam and AdamW."""

from typing import Any

import torch
from torch import Tensor


def adamw(
    theta: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return θ, m and v after step t."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    theta = theta - lr * m_hat / (v_hat.sqrt() + eps) - lr * decay * theta
    return theta, m, v


def cases(draw: Any) -> Any:
    def arguments(t: int, decay: float, *shape: int) -> dict[str, Any]:
        m, v = (draw.normal(*shape), draw.normal(*shape) ** 2) if t > 1 else (torch.zeros(shape).double(),) * 2
        settings = {"t": t, "lr": 0.1, "beta1": 0.9, "beta2": 0.98, "eps": 1e-2, "decay": decay}
        return {"theta": draw.normal(*shape), "g": draw.normal(*shape), "m": m, "v": v, **settings}

    yield "AdamW, step 7", arguments(7, 0.1, 3, 2)
    yield "the first step", arguments(1, 0.1, 4)
    yield "Adam: no decay", arguments(3, 0.0, 5)
    yield "a scalar, late", arguments(1000, 0.01)
    yield "a gradient of zero", (zero := arguments(2, 0.5, 3)) | {"g": 0 * zero["g"]}
