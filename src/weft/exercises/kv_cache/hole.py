import math

import torch
from torch import Tensor


def kv_cache(
    x: Tensor, K_cache: Tensor, V_cache: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (batch, T, d) of causal attention, and all keys and values (batch, S + T, d)."""
    K = ...  # the cached keys, then x W_k: (batch, S + T, d)
    V = ...  # the cached values, then x W_v: (batch, S + T, d)
    scores = ...  # x W_q Kᵀ/√d, with −∞ where a key is later than the query: (batch, T, S + T)
    output = ...  # softmax(scores) V: (batch, T, d)
    return output, K, V
