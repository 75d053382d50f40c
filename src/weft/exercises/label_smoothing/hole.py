import torch
from torch import Tensor


def label_smoothing(logits: Tensor, targets: Tensor, pad: int, eps: float) -> Tensor:
    """Return the mean smoothed cross-entropy of all targets but padding, a scalar."""
    log_p = ...  # log softmax of the logits over the words: (tokens, V)
    losses = ...  # −Σ_w q(w) log p(w), where q is ε/V everywhere and 1 − ε more at the target: (tokens,)
    loss = ...  # the mean over all targets that are not padding
    return loss
