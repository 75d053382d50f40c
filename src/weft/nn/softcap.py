"""A smooth bound on scores and logits."""

import torch
from torch import Tensor


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """c · tanh(scores/c): no score is further from 0 than c (Bello et al. 2017, §2). None leaves them as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
