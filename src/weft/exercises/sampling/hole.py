import math

import torch
from torch import Tensor


def sampling(logits: Tensor, temperature: float, k: int, top_p: float) -> Tensor:
    """Return the distribution (batch, V) to sample from."""
    scaled = ...  # logits / temperature
    by_k = ...  # the k largest kept, −∞ elsewhere; k = 0 keeps all
    by_p = (
        ...
    )  # the smallest set of likeliest tokens whose probabilities, under what top-k left, reach top_p; −∞ elsewhere
    p = ...  # softmax of what is left: (batch, V)
    return p
