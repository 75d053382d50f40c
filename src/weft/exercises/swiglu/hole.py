import torch
from torch import Tensor


def swiglu(x: Tensor, W_g: Tensor, W_u: Tensor, W_d: Tensor) -> Tensor:
    """Return (Swish(x W_g) ⊙ x W_u) W_d, (batch, T, d)."""
    gate = ...  # Swish(x W_g), with Swish(z) = z ⊙ σ(z): (batch, T, d_ff)
    up = ...  # x W_u: (batch, T, d_ff)
    output = ...  # (gate ⊙ up) W_d: (batch, T, d)
    return output
