import torch
from torch import Tensor


def accumulation(inputs: list[Tensor], targets: list[Tensor], W: Tensor, pad: int) -> Tensor:
    """Return the gradient (d, V) of the mean loss over all targets but padding."""
    count = ...  # the number of real targets of all micro-batches together
    gradient = ...  # the gradient of Σ −log p(target) over all of them, divided by the count: (d, V)
    return gradient
