import torch
from torch import Tensor


def loss_scaling(
    theta: Tensor, scaled: Tensor, scale: float, lr: float, good: int, interval: int
) -> tuple[Tensor, float, int]:
    """Return θ, the scale and the number of good steps in a row, after a step."""
    g = ...  # the gradients, which were computed from the loss times the scale, divided by the scale
    finite = ...  # whether every gradient is finite
    theta = ...  # θ − lr g if all are finite, else θ unchanged
    good = ...  # good + 1 if all are finite, else 0: steps without overflow in a row
    scale = ...  # halved after an overflow; doubled when good reaches the interval, and good is then 0 again
    return theta, scale, good
