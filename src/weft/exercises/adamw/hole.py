import torch
from torch import Tensor


def adamw(
    theta: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return θ, m and v after step t."""
    m = ...  # β₁ m + (1 − β₁) g
    v = ...  # β₂ v + (1 − β₂) g²
    m_hat = ...  # m / (1 − β₁^t), with t = 1 in the first step
    v_hat = ...  # v / (1 − β₂^t)
    theta = ...  # θ − lr · m̂/(√v̂ + eps) − lr · decay · θ, with the θ before the step
    return theta, m, v
