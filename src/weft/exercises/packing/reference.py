"""Packing without leaks."""

from typing import Any

import torch
from torch import Tensor


def packing(tokens: Tensor, lengths: list[int], ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask (T, T), the positions (T,) and the targets (T,)."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    same = document[:, None] == document
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    mask = same & causal
    targets = tokens.roll(-1)
    ends = torch.tensor(lengths).cumsum(dim=0)
    targets[ends - 1] = ignore
    return mask, positions, targets


def cases(draw: Any) -> Any:
    def arguments(lengths: list[int], ignore: int = -100) -> dict[str, Any]:
        return {"tokens": draw.integers(1, 50, sum(lengths)), "lengths": lengths, "ignore": ignore}

    yield "three documents", arguments([3, 2, 4])
    yield "one document", arguments([5])
    yield "one token", arguments([1])
    yield "documents of one token", arguments([1, 3, 1, 1], ignore=0)
    yield "random", arguments([draw.random.randrange(1, 6) for _ in range(4)])
