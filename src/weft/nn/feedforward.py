"""The position-wise layer between attentions: plain (Vaswani et al. 2017, §3.3) or gated (Shazeer 2020)."""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import config
from weft.nn.dropout import Dropout
from weft.nn.gelu import gelu, gelu_tanh
from weft.nn.linear import Linear

activations: dict[config.Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Plain(nn.Module):
    """f(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, settings: config.Plain, d_model: int):
        super().__init__()
        self.up = Linear(d_model, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = activations[settings.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        return self.down(self.dropout(self.activation(self.up(x))))


class Gated(nn.Module):
    """(f(x W_g) ⊙ x W_u) W_d. Gate and up are one matrix, gate first, so that x is read once."""

    def __init__(self, settings: config.Gated, d_model: int):
        super().__init__()
        self.gate_up = Linear(d_model, settings.d_ff, settings.d_ff, bias=settings.bias)
        self.down = Linear(settings.d_ff, d_model, bias=settings.bias, into_residual=True)
        self.dropout = Dropout(settings.dropout)
        self.activation = activations[settings.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up))


def build(settings: config.FeedForward, d_model: int) -> Plain | Gated:
    """The feed-forward layer that `settings` describe."""
    match settings:
        case config.Plain():
            return Plain(settings, d_model)
        case config.Gated():
            return Gated(settings, d_model)
        case _:
            assert_never(settings)
