import math

import torch
from torch import Tensor


def split_mlp(X: Tensor, A: Tensor, B: Tensor, g_Z: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    """Return Z = GeLU(XA)B and the gradient of X, computed in parts."""
    Y = ...  # for each process r: GeLU(X A_r), where A_r are its columns of A: (tokens, d_ff / processes)
    Z = ...  # Σ_r Y_r B_r, where B_r are its rows of B: the all-reduce of the forward pass
    g_Y = ...  # for each process: g_Z B_rᵀ
    g_X = ...  # Σ_r (g_Y_r ⊙ GeLU′(X A_r)) A_rᵀ: the all-reduce of the backward pass
    return Z, g_X
