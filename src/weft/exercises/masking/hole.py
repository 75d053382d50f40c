import torch
from torch import Tensor


def masking(
    words: Tensor, choice: Tensor, fate: Tensor, other: Tensor, mask_id: int, last_special: int
) -> tuple[Tensor, Tensor]:
    """Return the input tokens, and which words are to be predicted, (batch, time) each."""
    chosen = ...  # choice < 0.15, but never a special token: (batch, time)
    masked = ...  # chosen, and fate < 0.8
    replaced = ...  # chosen, and fate ≥ 0.9
    tokens = ...  # `mask_id` where masked, the words of `other` where replaced, else the words
    return tokens, chosen
