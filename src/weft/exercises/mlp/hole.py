import torch
from torch import Tensor


def mlp(x: Tensor, label: int, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return J, a scalar, and the gradients of α (hidden, inputs) and β (classes, 1 + hidden)."""
    a = ...  # α x: (hidden,); x begins with x_0 = 1
    z = ...  # σ(a), with z_0 = 1 in front: (1 + hidden,)
    b = ...  # β z: (classes,)
    y_hat = ...  # softmax(b): (classes,)
    J = ...  # −log ŷ_y
    g_b = ...  # ŷ − y, with y one-hot: softmax and cross-entropy in one, (classes,)
    g_beta = ...  # g_b zᵀ: (classes, 1 + hidden)
    g_z = ...  # βᵀ g_b: (1 + hidden,)
    g_a = ...  # g_z ⊙ z ⊙ (1 − z), without the component of the constant z_0: (hidden,)
    g_alpha = ...  # g_a xᵀ: (hidden, inputs)
    return J, g_alpha, g_beta
