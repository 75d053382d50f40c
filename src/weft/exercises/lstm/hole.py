import torch
from torch import Tensor


def lstm(x: Tensor, h: Tensor, c: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next hidden state and the next cell, (batch, d_h) each."""
    a = ...  # W [x; h] + b, the four gates side by side in the order i, f, g, o: (batch, 4 d_h)
    i = ...  # σ(a_i), how much of the candidate is written
    f = ...  # σ(a_f), how much of the old cell is kept
    g = ...  # tanh(a_g), the candidate
    o = ...  # σ(a_o), how much of the cell is shown
    c_new = ...  # f ⊙ c + i ⊙ g: (batch, d_h)
    h_new = ...  # o ⊙ tanh(c_new): (batch, d_h)
    return h_new, c_new
