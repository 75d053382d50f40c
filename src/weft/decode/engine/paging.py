"""Keys and values in blocks of a fixed pool, so that texts of any length share one piece of memory (Kwon et al. 2023).

A row's text lies in blocks that need not be neighbours; its block table says where. Rows whose texts begin alike may
name the same blocks. Which block belongs to which text is decided in `pool.py`; here they are written and read.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.models.transformer import Transformer


class BlockStore:
    """A Transformer's blocks: data (layers, blocks + 1, 2, kv_heads, block_size, d_head), allocated once.

    The block after the last, `nowhere`, takes what is written at places that a table has no block for: padding.
    """

    def __init__(self, model: Transformer, blocks: int, block_size: int):
        assert model.decoder is not None
        config, table = model.config, model.embedding.weight
        shape = (len(model.decoder.blocks), blocks + 1, 2, config.attention.groups, block_size, config.d_head)
        if table.device.type == "cpu":  # memory that is taken only as it is written
            zeros = np.zeros(math.prod(shape) * table.dtype.itemsize, dtype=np.uint8)
            self.data = torch.from_numpy(zeros).view(table.dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=table.dtype, device=table.device)
        self.blocks, self.block_size = blocks, block_size
        self.nowhere = blocks
        self._gathered = self.data.new_empty(0)

    def gathered(self, size: int) -> Tensor | None:
        """Space for so many numbers that rows read. A step uses it at once, so one piece serves all.

        None on a GPU: its allocator is quick, and a graph must find its memory again when this piece has moved.
        """
        if self.data.is_cuda:
            return None
        if self._gathered.numel() < size:
            self._gathered = self.data.new_empty(size + size // 4)
        return self._gathered[:size]


class PagedCache:
    """Some rows of a `BlockStore` as a cache for a Transformer's state, in the place of a `KeyValueCache`.

    tables (batch, width): the numbers of each row's blocks, in the order of its text.
    """

    def __init__(self, blocks: BlockStore, tables: Tensor):
        self.blocks, self.tables = blocks, tables
        self.store = blocks.data
        self._written: tuple[Tensor | None, int, int] | None = None  # what the indices below were made for
        self._slots = self._reach = tables

    def layer(self, number: int, places: Tensor | None, start: int) -> "PagedLayer":
        """One layer, about to be written at `places` (batch, time), or from `start` on in every row if None."""
        return PagedLayer(self, self.store[number], places, start)

    def indices(self, places: Tensor | None, start: int, time: int) -> tuple[Tensor, Tensor]:
        """Where `time` new keys and values go, and which stretches of the store the rows read: the same in all layers.

        The first counts vectors (2 · batch · kv_heads · time,), the second whole blocks of one head (2 · batch ·
        kv_heads · width,), both in the order of (2, batch, kv_heads, …).
        """
        if self._written is None or self._written[0] is not places or self._written[1:] != (start, time):
            block, device = self.blocks.block_size, self.tables.device
            kv_heads = self.store.shape[3]
            width = -(-(start + time) // block)
            tables = self.tables[:, :width]
            if tables.shape[1] < width:  # padding may stand behind the last block
                tables = torch.nn.functional.pad(tables, (0, width - tables.shape[1]), value=self.blocks.nowhere)
            at = torch.arange(start, start + time, device=device)[None] if places is None else places
            if places is not None:
                at = at.clamp(max=width * block - 1)
            columns = (at // block).expand(len(tables), -1)
            part = torch.arange(2 * kv_heads, device=device).view(2, 1, kv_heads, 1)
            written = tables.gather(1, columns)[None, :, None] * (2 * kv_heads) + part
            self._slots = (written * block + (at % block)[None, :, None]).flatten()
            self._reach = (tables[None, :, None] * (2 * kv_heads) + part).flatten()
            self._written = (places, start, time)
        return self._slots, self._reach


class PagedLayer(NamedTuple):
    """One layer's blocks (blocks, 2, kv_heads, block_size, d_head) while new keys and values come in."""

    cache: PagedCache
    store: Tensor
    places: Tensor | None
    start: int

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write these (batch, kv_heads, time, d_head) and give all up to the longest row."""
        B, H, T, D = keys.shape
        slots, reach = self.cache.indices(self.places, self.start, T)
        new = torch.stack((keys, values)).to(self.store.dtype)
        self.store.view(-1, D).index_copy_(0, slots, new.view(-1, D))
        # one head's part of a block lies together, so that this one copy is already as attention wants it
        stretches = self.store.view(-1, self.cache.blocks.block_size * D)
        place = self.cache.blocks.gathered(len(reach) * stretches.shape[1])
        seen = torch.index_select(stretches, 0, reach, out=None if place is None else place.view(len(reach), -1))
        keys, values = seen.view(2, B, H, -1, D)[:, :, :, : self.start + T]
        return keys, values
