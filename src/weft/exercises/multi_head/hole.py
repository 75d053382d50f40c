import math

import torch
from torch import Tensor


def multi_head(x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_o: Tensor, heads: int) -> Tensor:
    """Return Concat(head_1, …, head_h) W_o, (batch, T, d_model)."""
    Q = ...  # x W_q, split into heads of d_model / heads dimensions: (batch, heads, T, d_k)
    K = ...  # x W_k, split in the same manner
    V = ...  # x W_v, split in the same manner
    A = ...  # softmax(QKᵀ/√d_k) of every head: (batch, heads, T, T)
    concat = ...  # the heads A V side by side again: (batch, T, d_model)
    output = ...  # concat W_o: (batch, T, d_model)
    return output
