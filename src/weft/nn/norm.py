"""Normalisation over the last dimension, computed in the dtype of the gain (Ba et al. 2016)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import config
from weft.nn.init import Initialiser


class LayerNorm(nn.LayerNorm):
    """gain · (x − μ)/σ + bias over (…, width), σ the population's; `offset` is added to the trained gain."""

    offset = 0.0

    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Set the gain to 1, less the offset, and the bias to 0, whatever `init` says about other weights."""
        super().reset_parameters()
        if self.offset:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return super().forward(x)
        return F.layer_norm(x, self.normalized_shape, self.weight + self.offset, self.bias, self.eps)


class RMSNorm(nn.Module):
    """gain · x/RMS(x) (Zhang and Sennrich 2019), in the dtype of the gain, like LayerNorm under autocast. Without a
    gain, in float32 and rounded to the dtype of x."""

    def __init__(self, width: int, eps: float, offset: float = 0.0, *, has_gain: bool = True):
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset)) if has_gain else None

    def reset_parameters(self, init: Initialiser) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return F.rms_norm(x.float(), (self.width,), eps=self.eps).to(x.dtype)
        gain = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, self.eps)


class HeadNorm(nn.Module):
    """Norm of each head separately, with a gain per head and, if the settings have one, a bias."""

    def __init__(self, settings: config.Norm, heads: int, d_head: int):
        super().__init__()
        self.settings, self.width = settings, (d_head,)
        self.offset = settings.offset
        bias = isinstance(settings, config.LayerNorm) and settings.bias
        self.weight = nn.Parameter(torch.full((heads, d_head), 1.0 - self.offset)) if settings.gain else None
        self.bias = nn.Parameter(torch.zeros(heads, d_head)) if bias else None

    def reset_parameters(self, init: Initialiser) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, heads, time, d_head) → (batch, heads, time, d_head)."""
        x = x if self.weight is None else x.to(self.weight.dtype)
        normalise = F.layer_norm if isinstance(self.settings, config.LayerNorm) else F.rms_norm
        x = normalise(x, self.width, eps=self.settings.eps)
        x = x if self.weight is None else x * (self.weight + self.offset)[:, None]
        return x if self.bias is None else x + self.bias[:, None]


def build(settings: config.Norm, width: int) -> LayerNorm | RMSNorm:
    """Build the norm that `settings` describe, over vectors of this width."""
    if isinstance(settings, config.LayerNorm):
        norm = LayerNorm(width, settings.eps, elementwise_affine=settings.gain, bias=settings.bias)
        norm.offset = settings.offset
        return norm
    return RMSNorm(width, settings.eps, settings.offset, has_gain=settings.gain)
