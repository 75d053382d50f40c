import torch
from torch import Tensor


def elman(x: Tensor, W_ah: Tensor, W_ax: Tensor, b_a: Tensor, W_yh: Tensor, b_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distributions y (batch, T, V) of all steps, and the last state h (batch, d_h)."""
    a = ...  # a_t = W_ah h_{t−1} + W_ax x_t + b_a, with h_0 = 0: (batch, d_h)
    h = ...  # h_t = σ(a_t), the logistic function: (batch, d_h); return the last one
    y = ...  # y_t = softmax(W_yh h_t + b_y) of every step: (batch, T, V)
    return y, h
