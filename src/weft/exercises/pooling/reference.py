"""One vector for a sentence."""

from typing import Any

import torch
from torch import Tensor


def pooling(h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means (batch, d) over real tokens, and their cosines (batch, batch)."""
    mean = (h * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    unit = mean / mean.norm(dim=-1, keepdim=True)
    similarity = unit @ unit.T
    return mean, similarity


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, d: int) -> dict[str, Tensor]:
        lengths = draw.integers(1, T + 1, B)
        return {"h": draw.normal(B, T, d), "mask": torch.arange(T)[None] < lengths[:, None]}

    yield "random", arguments(3, 5, 4)
    yield "one sentence, one token", arguments(1, 1, 3)
    yield "no padding", arguments(2, 3, 4) | {"mask": torch.ones(2, 3, dtype=torch.bool)}
    yield "one real token each", arguments(2, 4, 3) | {"mask": torch.tensor([[True, False, False, False]] * 2)}
    yield (
        "padding on the left",
        arguments(2, 3, 5) | {"mask": torch.tensor([[False, True, True], [False, False, True]])},
    )
