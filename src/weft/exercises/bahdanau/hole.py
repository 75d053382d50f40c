import torch
from torch import Tensor


def bahdanau(s: Tensor, h: Tensor, mask: Tensor, W_a: Tensor, U_a: Tensor, v_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context (batch, d_h) and the weights α (batch, T) of the source words."""
    e = ...  # v_aᵀ tanh(W_a s + U_a h_j), for each source word j: (batch, T)
    alpha = ...  # softmax of e over the source words; padding, False in the mask, gets 0
    context = ...  # Σ_j α_j h_j: (batch, d_h)
    return context, alpha
