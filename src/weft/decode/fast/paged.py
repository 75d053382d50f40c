"""The CUDA fast path over the blocks of a pool: one token in many texts, and chunks of many prompts in one call.

The tokens of all chunks go through the linear layers one behind the other, without padding; attention takes them text
by text (`attend_chunks.py`). What a text reads follows from its block table, so that it may share its first blocks.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.decode.engine.paging import BlockStore
from weft.decode.fast.cuda import FusedLayers
from weft.decode.sampling import on_device
from weft.models.transformer import Transformer

WARPS = 2  # of a step's attention over several texts: 4.28 TB/s on an H200, where 4 reach 3.95
CROWD = 8  # programs of a step's attention for each processor of the GPU: several texts are of unequal lengths


@dataclass(frozen=True)
class Chunk:
    """Ids to be read after `read` others of the text in a slot."""

    slot: int
    read: int
    ids: list[int]


class PagedFastPath(FusedLayers):
    """The kernels of one model over the blocks of one store, whose numbers tables (slots, blocks of a text) hold."""

    def __init__(self, model: Transformer, store: BlockStore, tables: Tensor):
        from weft.decode.fast import attend_chunks

        super().__init__(model, store.blocks * store.block_size)
        self.store, self.tables, self.chunks = store, tables, attend_chunks

    def attention_for(self, batch: int, crowd: int | None = None) -> Any:
        """Attention of a step of so many rows."""
        attention = super().attention_for(batch, crowd or (CROWD if batch > 1 else self.attend.CROWD))
        attention.warps = WARPS if batch > 1 else attention.warps
        return attention

    def step(self, tokens: Tensor, reads: Tensor, slots: Tensor, attention: Any) -> Tensor:
        """tokens (rows,), each after reads (rows,) others of the text in its slot → features (rows, d_model).

        `attention` is this batch size's, from `attention_for`.
        """
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            qkv = self._times(block.attention.qkv, x, norm=block.attention_skip.norm)
            keys, values = self.store.data[number].unbind(1)
            given = qkv, self.angles, keys, values, reads, block.attention.scale, mixed
            attention(*given, pdl=self.pdl, tables=self.tables, slots=slots)
            x = self._feedforward(block, self._times(block.attention.out, mixed, residual=x))
        return self.normed(x)

    def read(self, chunks: list[Chunk]) -> Tensor:
        """Read chunks of several texts → features (chunks, d_model) after the last token of each."""
        lengths = [len(chunk.ids) for chunk in chunks]
        ends = list(accumulate(lengths))
        tokens, places, slots = self._sent(_columns(chunks, lengths), torch.long).unbind(0)
        tiles = self._sent(_tiles(chunks, ends, self.chunks.HIGH), torch.int32)
        last = self._sent(np.array(ends) - 1, torch.long)
        x = self._embed(tokens)
        mixed = torch.empty(len(x), self.heads * self.d_head, dtype=self.dtype, device=self.device)
        for number, block in enumerate(self.blocks):
            layer, attention = self.store.data[number], block.attention
            qkv = self._plain(attention.qkv, block.attention_skip.norm(x))
            self.chunks.store_chunks(qkv, self.angles, layer, places, (self.tables, slots))
            self.chunks.attend_chunks(qkv, layer, self.tables, tiles, attention.scale, mixed)
            del qkv
            x = self._read_feedforward(block, self._plus(attention.out, mixed, x))
        return self.normed(x.index_select(0, last))

    def _sent(self, numbers: npt.NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return on_device(torch.from_numpy(numbers).to(dtype), self.device)


def _columns(chunks: list[Chunk], lengths: list[int]) -> npt.NDArray[np.int64]:
    """(3, tokens): each token, its place in its text, and the text's slot."""
    tokens = np.concatenate([np.array(chunk.ids, dtype=np.int64) for chunk in chunks])
    places = np.concatenate([np.arange(chunk.read, chunk.read + len(chunk.ids)) for chunk in chunks])
    slots = np.repeat([chunk.slot for chunk in chunks], lengths)
    return np.stack([tokens, places, slots])


def _tiles(chunks: list[Chunk], ends: list[int], high: int) -> npt.NDArray[np.int64]:
    """(tiles, 4), as `attend_chunks` takes them; those that see most keys first, for they take longest."""
    tiles = [
        (chunk.slot, end - len(chunk.ids) + at, min(high, len(chunk.ids) - at), chunk.read + at)
        for chunk, end in zip(chunks, ends, strict=True)
        for at in range(0, len(chunk.ids), high)
    ]
    return np.array(sorted(tiles, key=lambda tile: -tile[3]))
