import math

import torch
from torch import Tensor


def perplexity(log_p: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the perplexity and the bits per byte, a scalar each."""
    nll = ...  # −Σ log p of all real tokens, in nats
    perplexity = ...  # exp(nll / number of real tokens)
    bits_per_byte = ...  # nll / ln 2 / number of bytes
    return perplexity, bits_per_byte
