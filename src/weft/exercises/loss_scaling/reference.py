"""Loss scaling."""

from typing import Any

import torch
from torch import Tensor


def loss_scaling(
    theta: Tensor, scaled: Tensor, scale: float, lr: float, good: int, interval: int
) -> tuple[Tensor, float, int]:
    """Return θ, the scale and the number of good steps in a row, after a step."""
    g = scaled / scale
    finite = bool(g.isfinite().all())
    theta = theta - lr * g if finite else theta
    good = good + 1 if finite else 0
    if not finite:
        scale = scale / 2
    elif good == interval:
        scale, good = scale * 2, 0
    return theta, scale, good


def cases(draw: Any) -> Any:
    def arguments(good: int, interval: int, bad: float | None = None) -> dict[str, Any]:
        scaled = draw.normal(5, scale=1000.0)
        if bad is not None:
            scaled[2] = bad
        theta = draw.normal(5)
        return {"theta": theta, "scaled": scaled, "scale": 1024.0, "lr": 0.5, "good": good, "interval": interval}

    yield "a good step", arguments(3, 100)
    yield "the scale grows", arguments(9, 10)
    yield "infinity", arguments(4, 10, float("inf"))
    yield "NaN", arguments(2, 10, float("nan"))
    yield "minus infinity at the end of an interval", arguments(9, 10, -float("inf"))
    yield "an interval of one step", arguments(0, 1)
