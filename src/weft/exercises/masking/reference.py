"""BERT's 80/10/10."""

from typing import Any

import torch
from torch import Tensor


def masking(
    words: Tensor, choice: Tensor, fate: Tensor, other: Tensor, mask_id: int, last_special: int
) -> tuple[Tensor, Tensor]:
    """Return the input tokens, and which words are to be predicted, (batch, time) each."""
    special = words <= last_special
    chosen = (choice < 0.15) & ~special
    masked = chosen & (fate < 0.8)
    replaced = chosen & (fate >= 0.9)
    tokens = torch.where(masked, mask_id, torch.where(replaced, other, words))
    return tokens, chosen


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, share: float = 1.0) -> dict[str, Any]:
        return {
            "words": draw.integers(0, 30, B, T), "choice": share * draw.uniform(B, T), "fate": draw.uniform(B, T),
            "other": draw.integers(5, 30, B, T), "mask_id": 4, "last_special": 4,
        }  # fmt: skip

    yield "random", arguments(3, 40)
    yield "everything is chosen", arguments(2, 20, 0.1)
    yield "batch 1, length 1", arguments(1, 1, 0.1)
    yield "special tokens alone", (special := arguments(1, 6, 0.1)) | {"words": special["words"] % 5}
    yield "another mask id", arguments(2, 20, 0.2) | {"mask_id": 0, "last_special": 9}
