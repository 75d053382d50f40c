"""The position-wise layer between attentions: plain (Vaswani et al. 2017, §3.3) or gated (Shazeer 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from weft.machine import has_triton
from weft.nn import config
from weft.nn.activations import activations
from weft.nn.dropout import Dropout, RowRng
from weft.nn.linear import Linear


class Plain(nn.Module):
    """f(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, settings: config.Plain, d_model: int):
        super().__init__()
        self.up = Linear(d_model, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = activations[settings.activation]

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        return self.down(self.dropout(self.activation(self.up(x, rng=rng)), rng), rng=rng)


class Gated(nn.Module):
    """(f(x W_g) ⊙ x W_u) W_d. Gate and up are one matrix, gate first, so that x is read once."""

    def __init__(self, settings: config.Gated, d_model: int):
        super().__init__()
        self.gate_up = Linear(d_model, settings.d_ff, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = activations[settings.activation]
        # the layer's end with a gradient of its own, which needs the whole of `down`
        self.swiglu: Any = _kernels() if settings.activation == "silu" else None

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        both = self.gate_up(x, rng=rng)
        if self._fused(both):
            return self.swiglu.apply(both, self.down.weight)
        gate, up = both.chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up, rng), rng=rng)

    def _fused(self, both: Tensor) -> bool:
        """Whether the gradient is the kernel's: in compiled training on a GPU, in 16 bits, with nothing in between."""
        if self.swiglu is None or not torch.compiler.is_compiling():
            return False
        plain = type(self.down) is Linear and self.down.bias is None and not self.dropout.drops
        return torch.is_grad_enabled() and plain and both.is_cuda and both.dtype == torch.bfloat16


def _kernels() -> Any:
    """The layer's end with its own gradient, where there is a GPU and Triton to compile it."""
    if not torch.cuda.is_available() or not has_triton():
        return None
    from weft.nn.kernels.feedforward import SwiGLU

    return SwiGLU


def build(settings: config.FeedForward, d_model: int) -> Plain | Gated:
    """The feed-forward layer that `settings` describe."""
    return Plain(settings, d_model) if isinstance(settings, config.Plain) else Gated(settings, d_model)
