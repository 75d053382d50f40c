import math

import torch
from torch import Tensor


def flash(Q: Tensor, K: Tensor, V: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return softmax(QKᵀ/√d)V, (T, d_v), and the log-sum-exp of each row of scores, (T,)."""
    S = ...  # Q K_jᵀ/√d for the keys of block j: (T, block)
    m = ...  # the largest score so far: max(m, row maximum of S): (T, 1)
    l = ...  # e^(m_old − m) l + Σ e^(S − m): the sum of all exponentials so far, relative to m
    O = ...  # e^(m_old − m) O + e^(S − m) V_j: the weighted sum of the values so far
    output = ...  # O / l, after the last block
    lse = ...  # m + log l: the log-sum-exp of each row: (T,)
    return output, lse
