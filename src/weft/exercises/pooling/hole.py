import torch
from torch import Tensor


def pooling(h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means (batch, d) over real tokens, and their cosines (batch, batch)."""
    mean = ...  # Σ_t mask_t h_t / Σ_t mask_t: (batch, d)
    similarity = ...  # the cosine of every pair of means: (batch, batch)
    return mean, similarity
