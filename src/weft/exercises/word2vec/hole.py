import torch
from torch import Tensor


def word2vec(v: Tensor, u: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, a scalar, and its gradient with respect to v, (d,)."""
    positive = ...  # log σ(u·v), for the word that does occur
    negative = ...  # Σ_k log σ(−n_k·v), for the words drawn at random
    loss = ...  # −(positive + negative)
    g_v = ...  # (σ(u·v) − 1) u + Σ_k σ(n_k·v) n_k: the gradient of the loss with respect to v
    return loss, g_v
