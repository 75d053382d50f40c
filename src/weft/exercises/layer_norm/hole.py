import torch
from torch import Tensor


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float, g_y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (rows, n), and the gradients of x (rows, n), gain (n,) and bias (n,)."""
    mu = ...  # the mean over the features: (rows, 1)
    sigma = ...  # √(1/n Σ (x_i − μ)² + eps): (rows, 1)
    x_hat = ...  # (x − μ)/σ: (rows, n)
    y = ...  # g ⊙ x̂ + b: (rows, n)
    g_hat = ...  # g_y ⊙ g, the gradient of x̂: (rows, n)
    g_x = ...  # (ĝ − mean(ĝ) − x̂ mean(ĝ ⊙ x̂))/σ, means over the features
    g_gain = ...  # Σ over the rows of g_y ⊙ x̂: (n,)
    g_bias = ...  # Σ over the rows of g_y: (n,)
    return y, g_x, g_gain, g_bias
