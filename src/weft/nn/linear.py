"""Linear layers, low-rank adapters for them, and embedding tables, initialised as a model's settings say.

Their constructors draw weights like torch's, and `reset_parameters(init)` draws again once the whole model is built.
The first draw is kept because it advances the random-number generator: a seed still gives the same weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn import native
from weft.nn.config import LoRA
from weft.nn.dropout import Dropout, RowRng
from weft.nn.init import Initialiser


class Linear(nn.Linear):
    """x Wᵀ + b of stacked matrices of `outputs` rows, so that x is read once; `rng` is for adapters (`LowRank`)."""

    def __init__(self, inputs: int, *outputs: int, bias: bool = True, into_residual: bool = False, device: Any = None):
        super().__init__(inputs, sum(outputs), bias, device)
        self.heights, self.into_residual = list(outputs), into_residual

    @torch.no_grad()
    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Draw each stacked matrix separately and zero the bias. Without `init`, draw as nn.Linear does."""
        if init is None:
            super().reset_parameters()
            return
        for matrix in self.weight.split(self.heights):
            init.matrix(matrix, self.into_residual)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        trains_bias = self.bias is not None and self.bias.requires_grad and type(self.bias) is nn.Parameter
        if trains_bias and native.trains_eagerly(x):
            return native.LinearWithBias.apply(x, self.weight, self.bias)
        return super().forward(x)


class Embedding(nn.Embedding):
    """Table of vectors, one per token."""

    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Draw the table. Without `init`, draw as nn.Embedding does."""
        if init is None:
            super().reset_parameters()
        else:
            init.table(self.weight)


class LowRank(Linear):
    """W x + (alpha / rank) B A x with trained A and B and a frozen W, including its bias (Hu et al. 2022, §4.1).

    B is 0 at first. Each of several stacked matrices (`heights`) has its own A and B, stacked as `a` (matrices · rank,
    in_features) and `b` (out_features, rank). The weight keeps its name in the state dict.
    """

    def __init__(self, linear: Linear, settings: LoRA):
        super().__init__(linear.in_features, *linear.heights, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias  # shared, not copied
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.rank, self.scale = settings.rank, settings.alpha / settings.rank
        self.dropout = Dropout(settings.dropout)
        self.a = nn.Parameter(self.weight.new_empty(len(self.heights) * self.rank, self.in_features))
        self.b = nn.Parameter(self.weight.new_empty(self.out_features, self.rank))
        self._reset_adapter()

    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Draw the frozen matrices as a `Linear` does, then A, and zero B."""
        super().reset_parameters(init)
        if init is not None:  # nn.Linear's constructor calls this before A exists
            self._reset_adapter()

    def _reset_adapter(self) -> None:
        nn.init.kaiming_uniform_(self.a, a=5**0.5)  # as nn.Linear's weights
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        inner = F.linear(self.dropout(x, rng), self.a) * self.scale
        parts = zip(inner.split(self.rank, dim=-1), self.b.split(self.heights), strict=True)
        return super().forward(x) + torch.cat([F.linear(part, b) for part, b in parts], dim=-1)

    def difference(self) -> Tensor:
        """(alpha / rank) B A, (out_features, in_features)."""
        parts = zip(self.b.split(self.heights), self.a.split(self.rank), strict=True)
        return torch.cat([b @ a for b, a in parts]) * self.scale

    @torch.no_grad()
    def merge(self) -> Linear:
        """Return a new plain layer with the weight W + (alpha / rank) B A."""
        plain = Linear(self.in_features, *self.heights, bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight + self.difference().to(self.weight.dtype))
        plain.bias = None if self.bias is None else nn.Parameter(self.bias.clone())
        return plain
