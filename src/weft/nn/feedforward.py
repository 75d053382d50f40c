"""Position-wise feed-forward layer: plain (Vaswani et al. 2017, §3.3), gated (Shazeer 2020), or experts."""

from typing import Any, assert_never

import torch
from torch import Tensor, nn

from weft.machine import has_triton
from weft.nn import config
from weft.nn.activations import activations
from weft.nn.activations import build as build_activation
from weft.nn.dropout import Dropout, RowRng
from weft.nn.experts import Experts
from weft.nn.linear import Linear


class Plain(nn.Module):
    """f(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, settings: config.Plain, d_model: int):
        super().__init__()
        self.up = Linear(d_model, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = build_activation(settings.activation, settings.beta)

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        return self.down(self.dropout(self.activation(self.up(x, rng=rng)), rng), rng=rng)


class Gated(nn.Module):
    """(f(x W_g) ⊙ x W_u) W_d. One matrix holds gate and up, gate first, so that x is read once."""

    def __init__(self, settings: config.Gated, d_model: int):
        super().__init__()
        self.gate_up = Linear(d_model, settings.d_ff, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = build_activation(settings.activation, settings.beta)
        self.swiglu: Any = _swiglu_kernel() if self.activation is activations["silu"] else None

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        gate_up = self.gate_up(x, rng=rng)
        # compiled training on a GPU in bf16, without bias or dropout
        if self.swiglu is not None and torch.compiler.is_compiling() and torch.is_grad_enabled():
            plain = type(self.down) is Linear and self.down.bias is None and not self.dropout.drops
            if plain and gate_up.is_cuda and gate_up.dtype == torch.bfloat16:
                return self.swiglu.apply(gate_up, self.down.weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up, rng), rng=rng)


def _swiglu_kernel() -> Any:
    if not torch.cuda.is_available() or not has_triton():
        return None
    from weft.nn.kernels.feedforward import SwiGLU

    return SwiGLU


def build(settings: config.Plain | config.Gated | config.Experts, d_model: int) -> Plain | Gated | Experts:
    """Build the feed-forward layer that `settings` describe."""
    match settings:
        case config.Plain():
            return Plain(settings, d_model)
        case config.Gated():
            return Gated(settings, d_model)
        case config.Experts():
            shared = config.Gated(d_ff=settings.shared_width or 1, activation=settings.activation, beta=settings.beta)
            return Experts(settings, d_model, Gated(shared, d_model) if settings.shared_width else None)
        case _:
            assert_never(settings)
