"""A mask laid out as each attention kernel needs it, once for all layers that share it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from weft.nn.mask import Mask
from weft.nn.position import Position

# A mask of more entries than this is made block by block of queries, and again in the backward pass.
MAX_DENSE_ENTRIES = 2**22
# On a GPU a mask of more entries than this is left to FlexAttention, which compiles a kernel for every new shape:
# shorter sequences come in many shapes, and their masks fit in memory.
MIN_FLEX_ENTRIES = 2**18


class AttentionMask:
    """A mask between queries and keys at known positions, with what their positions do to the scores.

    It is the same for every layer of a kind. queries (batch or 1, time) and keys (batch or 1, source time) are
    positions; angles rotate this call's own tokens.
    """

    def __init__(
        self,
        mask: Mask,
        position: Position,
        queries: Tensor,
        keys: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
    ):
        self.mask, self.position, self.angles = mask, position, angles
        self.queries, self.keys = queries, keys
        self._dense: Tensor | None = None
        self._blocks: Any = None

    def dense(self) -> Tensor | None:
        """The whole mask at once, made when the first layer needs it: bool, or floats where positions add a bias.

        None where every query sees every key.
        """
        if self._dense is None:
            self._dense = self.part(slice(0, self.queries.shape[1]), slice(0, self.keys.shape[1]))
        return self._dense

    @property
    def flexes(self) -> bool:
        """Whether FlexAttention's kernels fit: on a GPU, for a mask too large to be laid out.

        A text that is read piece by piece meets a new shape each time, and is left to others.
        """
        mask, entries = self.mask, self.queries.shape[1] * self.keys.shape[1]
        plain = mask.triangular or mask.full or self.position.biases
        pieces = mask.places is not None or mask.offset > 0
        return self.queries.is_cuda and not plain and not pieces and entries > MIN_FLEX_ENTRIES

    def prepare(self) -> None:
        """Build now what the first layer would build for all: layers that are recomputed must not change any state."""
        if self.flexes:
            self.blocks()
        if self.queries.shape[1] * self.keys.shape[1] <= MAX_DENSE_ENTRIES:
            self.dense()

    def mapped(self, map_blocks: Callable[[Mask, Tensor, Tensor], Any]) -> "AttentionMask":
        """The same with FlexAttention's map, made by `map_blocks`, where its kernels fit."""
        if not self.flexes:
            return self
        copy = AttentionMask(self.mask, self.position, self.queries, self.keys, self.angles)
        copy._blocks = map_blocks(self.mask, self.queries, self.keys)
        return copy

    def part(self, queries: slice, keys: slice) -> Tensor | None:
        """The mask (batch or 1, heads or 1, time, source time) of some queries against some keys."""
        bias = self.position.heads_bias(self.queries[:, queries], self.keys[:, keys])
        if self.mask.full:
            return bias
        seen = self.mask.dense(queries, keys, self.queries.device)
        return seen if bias is None else torch.where(seen, bias, float("-inf"))

    def blocks(self) -> Any:
        """FlexAttention's map of the blocks that have something to see."""
        if self._blocks is None:
            self._blocks = map_blocks(self.mask, self.queries, self.keys)
        return self._blocks


def map_blocks(mask: Mask, queries: Tensor, keys: Tensor) -> Any:
    """FlexAttention's map of a mask between queries (batch or 1, time) and keys (batch or 1, source time)."""
    rows = mask.rows if mask.rows > 1 else None
    return create_block_mask(mask.mask_mod(), rows, None, queries.shape[1], keys.shape[1], device=queries.device)
