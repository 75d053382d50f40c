"""Hashed embeddings of the n-grams that end at a token (Svenstrup et al. 2017; Pagnoni et al. 2024, §3.2.1).

The n-gram x₁ … xₙ has in a table of R rows the row

    (Σₖ (xₙ₋ₖ + 1) · 1000000007ᵏ mod 2147483647) mod R,    k = 0 … n − 1.

A token before the beginning of a text or document counts as −1, and so adds nothing. The powers are reduced
mod 2147483647 as well, so that sums stay below 2⁶³: integer arithmetic, identical on every device.
"""

from collections.abc import Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.config import HashedNGrams
from weft.nn.init import Initialiser
from weft.nn.linear import Linear

BASE, PRIME = 1_000_000_007, 2_147_483_647
Integers = TypeVar("Integers", int, Tensor)


class NGramEmbedding(nn.Module):
    """Sum of an n-gram embedding for each order, from tables stacked in `weight` (orders · rows, width), 0 at first."""

    def __init__(self, settings: HashedNGrams, d_embedding: int):
        super().__init__()
        self.orders, self.rows, self.reach = settings.orders, settings.rows, settings.reach
        width = settings.width or d_embedding
        self.weight = nn.Parameter(torch.zeros(len(self.orders) * self.rows, width))
        self.projection = None if settings.width is None else Linear(width, d_embedding, bias=False)

    @torch.no_grad()
    def reset_parameters(self, init: Initialiser | None = None) -> None:
        self.weight.zero_()

    def indices(self, tokens: Tensor, before: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Rows of `weight`, (batch, time, orders), for tokens (batch, time). `before` (batch, reach) are the preceding
        tokens, −1 where there are none. N-grams do not cross the boundaries between `documents` (batch, time)."""
        time, reach = tokens.shape[1], self.reach
        padded = F.pad(tokens, (reach, 0), value=-1) if before is None else torch.cat((before, tokens), dim=1)
        shifted = [padded[:, reach - back : reach - back + time] for back in range(reach + 1)]
        if documents is not None:
            ids = F.pad(documents, (reach, 0))
            same = [ids[:, reach - back : reach - back + time] == documents for back in range(reach + 1)]
            shifted = [torch.where(inside, token, -1) for inside, token in zip(same, shifted, strict=True)]
        return torch.stack(self.hash_rows(shifted), dim=-1)

    def hash_rows(self, last: Sequence[Integers]) -> list[Integers]:
        """Rows of `weight` for the last tokens, newest first, −1 where there are none: ints, or tensors of them."""
        total, power = last[0] + 1, 1
        rows: dict[int, Integers] = {}
        for back in range(1, self.reach + 1):
            power = power * BASE % PRIME
            total = total + (last[back] + 1) * power
            rows[back + 1] = total % PRIME % self.rows
        return [rows[order] + table * self.rows for table, order in enumerate(self.orders)]

    def forward(self, tokens: Tensor, before: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Vectors (batch, time, d_embedding) to add to the embeddings of tokens (batch, time)."""
        rows = self.indices(tokens, before, documents)
        x = F.embedding_bag(rows.flatten(0, 1), self.weight, mode="sum").unflatten(0, tokens.shape)
        return x if self.projection is None else self.projection(x)

    def embed_one(self, last: Sequence[int]) -> Tensor:
        """Vector (d_embedding,) to add to the embedding of one token, `last[0]`: many times faster than `forward`."""
        x = reduce(torch.add, [self.weight[row] for row in self.hash_rows(last)])
        return x if self.projection is None else self.projection(x)
