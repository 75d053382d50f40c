import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float, g_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (rows, n), and the gradients of x (rows, n) and gain (n,)."""
    rms = ...  # √(1/n Σ x_i² + eps): (rows, 1)
    x_hat = ...  # x/RMS(x): (rows, n)
    y = ...  # x̂ ⊙ g: (rows, n)
    g_hat = ...  # g_y ⊙ g: (rows, n)
    g_x = ...  # (ĝ − x̂ mean(ĝ ⊙ x̂))/RMS, the mean over the features
    g_gain = ...  # Σ over the rows of g_y ⊙ x̂: (n,)
    return y, g_x, g_gain
