"""Linear layers and tables of embeddings that are initialised as a model's settings say.

Their constructors draw weights too, as torch's do, and `reset_parameters(init)` draws again once the whole model is
built. The first draw is kept because it advances the random generator: a seed still gives the weights it always gave.
"""

from typing import Any

import torch
from torch import Tensor, nn

from weft.nn.dropout import RowRng
from weft.nn.init import Initialiser


class Linear(nn.Linear):
    """x Wᵀ + b. Several heights in `outputs` are several matrices, one above the other, so that x is read once.

    `into_residual`: the result is added to the residual stream, on which some initialisations depend. An adapter beside
    the matrix (`nn/lora.py`) drops some of what it reads, by the pass's `rng`.
    """

    def __init__(self, inputs: int, *outputs: int, bias: bool = True, into_residual: bool = False, device: Any = None):
        super().__init__(inputs, sum(outputs), bias, device)
        self.heights = list(outputs)
        self.into_residual = into_residual

    @torch.no_grad()
    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Draw each matrix by itself; the bias becomes 0. Without `init`, as nn.Linear does."""
        if init is None:
            super().reset_parameters()
            return
        for matrix in self.weight.split(self.heights):
            init.matrix(matrix, self.into_residual)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, rng: RowRng | None = None) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return super().forward(x)


class Embedding(nn.Embedding):
    """A table of vectors, one a token."""

    def reset_parameters(self, init: Initialiser | None = None) -> None:
        """Draw the table. Without `init`, as nn.Embedding does."""
        if init is None:
            super().reset_parameters()
        else:
            init.table(self.weight)
