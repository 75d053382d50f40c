"""The lecture's network, forward and backward by hand."""

from typing import Any

import torch
from torch import Tensor


def mlp(x: Tensor, label: int, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return J, a scalar, and the gradients of α (hidden, inputs) and β (classes, 1 + hidden)."""
    a = alpha @ x
    z = torch.cat([torch.ones_like(a[:1]), torch.sigmoid(a)])
    b = beta @ z
    y_hat = b.softmax(dim=0)
    J = -torch.log(y_hat[label])
    y = torch.zeros_like(y_hat)
    y[label] = 1
    g_b = y_hat - y
    g_beta = torch.outer(g_b, z)
    g_z = beta.T @ g_b
    g_a = (g_z * z * (1 - z))[1:]
    g_alpha = torch.outer(g_a, x)
    return J, g_alpha, g_beta


def cases(draw: Any) -> Any:
    def arguments(inputs: int, hidden: int, classes: int) -> dict[str, Any]:
        x = torch.cat([torch.ones(1, dtype=torch.float64), draw.normal(inputs)])
        label = draw.random.randrange(classes)
        return {
            "x": x,
            "label": label,
            "alpha": draw.normal(hidden, 1 + inputs),
            "beta": draw.normal(classes, 1 + hidden),
        }

    yield "random", arguments(3, 4, 3)
    yield "one hidden unit", arguments(2, 1, 2)
    yield "no inputs but the intercept", arguments(0, 3, 2)
    yield "the slide", {
        "x": torch.tensor([1.0, 1.0, 2.0]).double(), "label": 1, "alpha": torch.tensor([[0.1, 0.3, -0.2]]).double(),
        "beta": torch.tensor([[0.0, 0.5], [0.2, -0.4]]).double(),
    }  # fmt: skip
