import math

import torch
from torch import Tensor


def sampling(logits: Tensor, temperature: float, k: int, top_p: float) -> Tensor:
    """Return the distribution (batch, V) to sample from."""
    scaled = ...  # logits / temperature
    by_k = ...  # the k largest kept, −∞ elsewhere; k = 0 keeps all
    by_p = ...  # the fewest likeliest tokens whose probabilities, after top-k, reach top_p; −∞ elsewhere
    p = ...  # softmax of what is left: (batch, V)
    return p
