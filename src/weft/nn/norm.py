"""Normalisation over the last dimension, kept in float32 where the numbers are small (Ba et al. 2016)."""

from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import config
from weft.nn.init import Initialiser


class LayerNorm(nn.Module):
    """gain · (x − μ)/σ + bias, with σ the population deviation."""

    def __init__(self, width: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def reset_parameters(self, init: Initialiser) -> None:
        """A gain of 1 and no bias."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """gain · x/RMS(x) (Zhang and Sennrich 2019), in the type of the gain, as autocast has LayerNorm."""

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))

    def reset_parameters(self, init: Initialiser) -> None:
        """A gain of 1."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        gain = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, self.eps)


def build(settings: config.Norm, width: int) -> LayerNorm | RMSNorm:
    """The norm that `settings` describe, over vectors of `width`."""
    match settings:
        case config.LayerNorm():
            return LayerNorm(width, settings.eps, settings.bias)
        case config.RMSNorm():
            return RMSNorm(width, settings.eps, settings.offset)
        case _:
            assert_never(settings)
