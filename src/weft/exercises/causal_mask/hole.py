import math

import torch
from torch import Tensor


def causal_mask(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and targets, (batch, T) each, and the mask (T, T)."""
    inputs = ...  # all tokens but the last: (batch, T)
    targets = ...  # all tokens but the first: the word after each input: (batch, T)
    mask = ...  # 0 where query i may see key j, that is j ≤ i, and −∞ elsewhere: (T, T)
    return inputs, targets, mask
