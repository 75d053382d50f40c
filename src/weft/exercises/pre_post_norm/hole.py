import torch
from torch import Tensor


def pre_post_norm(x: Tensor, W1: Tensor, W2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the post-norm and of the pre-norm block, (batch, T, d) each."""
    post = ...  # LayerNorm(x + f(x)), with f(x) = ReLU(x W1) W2: (batch, T, d)
    pre = ...  # x + f(LayerNorm(x)): (batch, T, d)
    return post, pre
