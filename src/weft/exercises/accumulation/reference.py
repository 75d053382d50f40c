"""Gradient accumulation with unequal lengths."""

from typing import Any

import torch
from torch import Tensor


def accumulation(inputs: list[Tensor], targets: list[Tensor], W: Tensor, pad: int) -> Tensor:
    """Return the gradient (d, V) of the mean loss over all targets but padding."""
    count = sum(int((y != pad).sum()) for y in targets)
    gradient = torch.zeros_like(W)
    for x, y in zip(inputs, targets, strict=True):
        keep = y != pad
        error = (x @ W).softmax(dim=-1)
        error[torch.arange(len(y)), y] -= 1
        gradient = gradient + x[keep].T @ error[keep] / count
    return gradient


def cases(draw: Any) -> Any:
    def arguments(lengths: list[int], d: int = 3, V: int = 4) -> dict[str, Any]:
        targets = [draw.integers(0, V, length) for length in lengths]
        targets[0][0] = 1
        return {
            "inputs": [draw.normal(length, d) for length in lengths],
            "targets": targets,
            "W": draw.normal(d, V),
            "pad": 0,
        }

    yield "random", arguments([6, 3, 1])
    yield "one micro-batch", arguments([5])
    yield "one token", arguments([1])
    padded = arguments([3, 4, 2])
    yield (
        "padding alone",
        padded | {"targets": [padded["targets"][0], torch.zeros(4, dtype=torch.int64), torch.tensor([2, 0])]},
    )
    yield "very unequal", arguments([1, 20, 2])
