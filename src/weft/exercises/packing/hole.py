import torch
from torch import Tensor


def packing(tokens: Tensor, lengths: list[int], ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask (T, T), the positions (T,) and the targets (T,)."""
    document = ...  # the number of the document that each token belongs to: (T,)
    positions = ...  # 0, 1, … within each document: (T,)
    mask = ...  # True where query and key are of one document, and the key is not later: (T, T)
    targets = ...  # the next token, or `ignore` for the last token of each document: (T,)
    return mask, positions, targets
