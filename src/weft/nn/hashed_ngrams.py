"""Embeddings of the n-grams that end at a token, found by hashing (Svenstrup et al. 2017; Pagnoni et al. 2024, §3.2.1).

Of the n-gram x₁ … xₙ, whose last token is xₙ, a table of R rows has the row

    (Σₖ (xₙ₋ₖ + 1) · 1000000007ᵏ mod 2147483647) mod R,    k = 0 … n − 1,

where a token before the beginning of a text or a document counts as −1, and so adds nothing. The powers are
taken mod 2147483647 as well, so that sums stay below 2⁶³: these are whole numbers, the same on every device.
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
Number = TypeVar("Number", int, Tensor)


class NGramEmbedding(nn.Module):
    """A table for each order, one below the other in `weight` (orders · rows, width): all of a token's rows are found
    and added in one call, and have one gradient. Where tables are narrower than the tokens' embeddings, a matrix makes
    their sum as wide. They are 0 at first, so that a model begins as it would without them."""

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
        """The rows of `weight` that belong to tokens (batch, time), (batch, time, orders).

        `before` (batch, reach) are the tokens that precede them, −1 where there are none; n-grams don't reach from one
        of the numbers in documents (batch, time) into another.
        """
        time, reach = tokens.shape[1], self.reach
        every = F.pad(tokens, (reach, 0), value=-1) if before is None else torch.cat((before, tokens), dim=1)
        shifted = [every[:, reach - back : reach - back + time] for back in range(reach + 1)]
        if documents is not None:
            numbers = F.pad(documents, (reach, 0))
            own = [numbers[:, reach - back : reach - back + time] == documents for back in range(reach + 1)]
            shifted = [torch.where(same, each, -1) for same, each in zip(own, shifted, strict=True)]
        return torch.stack(self.found(shifted), dim=-1)

    def found(self, last: Sequence[Number]) -> list[Number]:
        """The rows of `weight` that belong to the last tokens, the newest first, −1 where there are none; as they are
        given, whole numbers or tensors of them."""
        total, power = last[0] + 1, 1
        rows: dict[int, Number] = {}
        for back in range(1, self.reach + 1):
            power = power * BASE % PRIME
            total = total + (last[back] + 1) * power
            rows[back + 1] = total % PRIME % self.rows
        return [rows[order] + table * self.rows for table, order in enumerate(self.orders)]

    def forward(self, tokens: Tensor, before: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """What is added to the embeddings of tokens (batch, time), (batch, time, d_embedding)."""
        rows = self.indices(tokens, before, documents)
        x = F.embedding_bag(rows.flatten(0, 1), self.weight, mode="sum").unflatten(0, tokens.shape)
        return x if self.projection is None else self.projection(x)

    def of_one(self, last: Sequence[int]) -> Tensor:
        """What is added to the embedding of one token, the first of `last`, (d_embedding,): many times as fast."""
        x = reduce(torch.add, [self.weight[row] for row in self.found(last)])
        return x if self.projection is None else self.projection(x)
