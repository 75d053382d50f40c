"""Perplexity and bits per byte."""

import math
from typing import Any

import torch
from torch import Tensor


def perplexity(log_p: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the perplexity and the bits per byte, a scalar each."""
    nll = -log_p[mask].sum()
    perplexity = torch.exp(nll / mask.sum())
    bits_per_byte = nll / math.log(2) / size
    return perplexity, bits_per_byte


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, size: int) -> dict[str, Any]:
        mask = torch.arange(T)[None] < draw.integers(1, T + 1, B)[:, None]
        return {"log_p": draw.uniform(B, T).log(), "mask": mask, "size": size}

    yield "random", arguments(3, 6, 50)
    slide = torch.tensor([[1 / 4, 1 / 3, 1 / 4, 1 / 3]], dtype=torch.float64).log()
    yield "the slide", {"log_p": slide, "mask": torch.ones(1, 4, dtype=torch.bool), "size": 20}
    yield "one token", arguments(1, 1, 3)
    short = arguments(2, 5, 30)
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    yield "a very short sentence", short | {"mask": mask}
    yield "−∞ behind the mask", short | {"mask": mask, "log_p": short["log_p"].masked_fill(~mask, -math.inf)}
