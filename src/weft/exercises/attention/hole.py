import math

import torch
from torch import Tensor


def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(QKᵀ/√d_k)V, (batch, T, d_v); True in `mask` allows a query to see a key."""
    scores = ...  # QKᵀ/√d_k: (batch, T, S)
    A = ...  # softmax of the scores over the keys; a key that the mask excludes gets probability 0
    output = ...  # A V: (batch, T, d_v)
    return output
