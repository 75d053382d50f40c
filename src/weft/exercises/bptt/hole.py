import torch
from torch import Tensor


def bptt(x: Tensor, h0: Tensor, W: Tensor, U: Tensor, g_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W (d_h, d_h), U (d_h, d_x) and h_0 (batch, d_h); g_h is that of each state."""
    h = ...  # forward: h_t = tanh(W h_{t−1} + U x_t), t = 1 … T, keeping all states
    g_a = ...  # backward, t = T … 1: g_{a_t} = (g_{h_t} + Wᵀ g_{a_{t+1}}) ⊙ (1 − h_t²): (batch, d_h)
    g_W = ...  # Σ_t g_{a_t} h_{t−1}ᵀ, summed over the batch: (d_h, d_h)
    g_U = ...  # Σ_t g_{a_t} x_tᵀ: (d_h, d_x)
    g_h0 = ...  # Wᵀ g_{a_1}: (batch, d_h)
    return g_W, g_U, g_h0
