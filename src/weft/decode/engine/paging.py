"""Paged KV cache: keys and values in fixed-size blocks, so that texts share one allocation (Kwon et al. 2023).

A text's blocks need not be contiguous; its block table lists them. `BlockPool` decides which text has which block: use
counts, shared prefixes, and blocks to be reused. A full block has a key, a hash of its tokens and all tokens before
them. Another text with the same prefix uses the same block instead of reading those tokens again. A block that no text
uses any more stays cached until its memory is needed; the least recently used one is evicted first.
Keys and values keep their dtype, or are quantised to int8 with one scale per head and token.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decode.fast.quantized_weights import quantize_vectors
from weft.models.transformer import Transformer
from weft.nn.cache import stack_padded

BlockKey = bytes
CacheBits = Literal["int8"]
SCALE_DTYPE = torch.bfloat16  # of a quantised vector's scale


def block_bytes(model: Transformer, block_size: int, bits: CacheBits | None = None) -> int:
    """Bytes of the keys and values of `block_size` tokens in all layers."""
    assert model.decoder is not None
    config, width = model.config, model.embedding.weight.dtype.itemsize
    parts, heads, values = config.cache_shape
    vector = values * width if bits is None else values + SCALE_DTYPE.itemsize
    return parts * len(model.decoder.blocks) * heads * block_size * vector


class BlockStore:
    """A Transformer's KV blocks: data (layers, blocks + 1, 2, kv_heads, block_size, width), allocated once. In 8 bits
    they have `scales` (layers, blocks + 1, 2, kv_heads, block_size). Latent attention has 1 instead of 2.

    The block after the last, `nowhere`, receives what is written for positions without a block: padding.
    """

    def __init__(self, model: Transformer, blocks: int, block_size: int, *, bits: CacheBits | None = None):
        assert model.decoder is not None
        config, table = model.config, model.embedding.weight
        parts, heads, width = config.cache_shape
        shape = (len(model.decoder.blocks), blocks + 1, parts, heads, block_size, width)
        self.data = _zeros(shape, table.dtype if bits is None else torch.int8, table.device)
        self.scales = None if bits is None else _zeros(shape[:-1], SCALE_DTYPE, table.device)
        self.blocks, self.block_size, self.nowhere = blocks, block_size, blocks
        self._scratch = self.data.new_empty(0)

    def layer(self, number: int) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Keys and values (blocks, kv_heads, block_size, d_head) and, in 8 bits, the scales of both."""
        keys, values = self.data[number].unbind(1)
        return keys, values, (None, None) if self.scales is None else self.scales[number].unbind(1)

    def scratch(self, size: int) -> Tensor | None:
        """Memory for `size` gathered elements. Each layer uses it up before the next, so all share it. None on a GPU:
        its allocator is fast, and a graph needs memory that stays where it is."""
        if self.data.is_cuda:
            return None
        if self._scratch.numel() < size:
            self._scratch = self.data.new_empty(size + size // 4)
        return self._scratch[:size]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)  # pages are allocated when first written
    return torch.from_numpy(zeros).view(dtype).view(shape)


class PagedCache:
    """Rows of a `BlockStore` as the cache of a Transformer's state; tables (batch, width) list each row's blocks."""

    def __init__(self, blocks: BlockStore, tables: Tensor):
        self.blocks, self.tables = blocks, tables
        self.store = blocks.data
        self._key: tuple[Tensor | None, int, int] | None = None  # arguments for which the indices were computed
        self._written = self._read = tables

    def layer(self, number: int, positions: Tensor | None, start: int) -> "PagedLayer":
        """One layer, about to be written at `positions` (batch, time), or from `start` on in every row if None."""
        scales = self.blocks.scales
        return PagedLayer(self, self.store[number], None if scales is None else scales[number], positions, start)

    def indices(self, positions: Tensor | None, start: int, time: int) -> tuple[Tensor, Tensor]:
        """Indices into a layer's store, the same for all layers: of the vectors that `time` new keys and values are
        written to, (2 · batch · kv_heads · time,), and of the blocks of one head that the rows read, (2 · batch ·
        kv_heads · width,). Both are in the order (2, batch, kv_heads, …)."""
        if self._key is None or self._key[0] is not positions or self._key[1:] != (start, time):
            block, device = self.blocks.block_size, self.tables.device
            parts, kv_heads = self.store.shape[2:4]
            width = -(-(start + time) // block)
            tables = self.tables[:, :width]
            if tables.shape[1] < width:  # padding may be behind the last block
                tables = pad(tables, (0, width - tables.shape[1]), value=self.blocks.nowhere)
            at = torch.arange(start, start + time, device=device)[None] if positions is None else positions
            if positions is not None:
                at = at.clamp(max=width * block - 1)
            columns = (at // block).expand(len(tables), -1)
            head = torch.arange(parts * kv_heads, device=device).view(parts, 1, kv_heads, 1)
            written = tables.gather(1, columns)[None, :, None] * (parts * kv_heads) + head
            self._written = (written * block + (at % block)[None, :, None]).flatten()
            self._read = (tables[None, :, None] * (parts * kv_heads) + head).flatten()
            self._key = (positions, start, time)
        return self._written, self._read


class PagedLayer(NamedTuple):
    """One layer's blocks (blocks, 2, kv_heads, block_size, d_head) while it is extended; in 8 bits with scales."""

    cache: PagedCache
    store: Tensor
    scales: Tensor | None
    positions: Tensor | None
    start: int

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write these (batch, kv_heads, time, d_head), and return all up to the longest row."""
        (B, H, T, d_head), d_v, D = keys.shape, values.shape[-1], self.store.shape[-1]
        written, read = self.cache.indices(self.positions, self.start, T)
        new, dtype = stack_padded(keys, values)[: self.store.shape[1]], keys.dtype
        if self.scales is not None:
            new, scales = quantize_vectors(new)
            self.scales.view(-1).index_copy_(0, written, scales.flatten())
        self.store.view(-1, D).index_copy_(0, written, new.to(self.store.dtype).view(-1, D))
        # One head's part of a block is contiguous, so a single copy gives the layout that attention needs.
        head_blocks = self.store.view(-1, self.cache.blocks.block_size * D)
        out = self.cache.blocks.scratch(len(read) * head_blocks.shape[1])
        gathered = torch.index_select(head_blocks, 0, read, out=None if out is None else out.view(len(read), -1))
        if self.scales is not None:
            scales = self.scales.view(-1, self.cache.blocks.block_size).index_select(0, read)
            gathered = gathered.view(-1, D).to(dtype) * scales.view(-1, 1).to(dtype)
        stored = gathered.view(len(new), B, H, -1, D)[:, :, :, : self.start + T]
        return stored[0, ..., :d_head], stored[-1, ..., :d_v]


@dataclass
class BlockTable:
    """One text's blocks, in order, and the `keys` of its full ones; `read` of its tokens are in them."""

    keys: list[BlockKey]
    read: int
    blocks: list[int] = field(default_factory=list)
    pending: set[BlockKey] = field(default_factory=set)  # keys of blocks that this text is the first to read


class BlockPool:
    """Bookkeeping of `blocks` blocks of `block_size` tokens; at most `max_cached` unused ones stay cached."""

    def __init__(self, blocks: int, block_size: int, max_cached: int | None = None):
        assert blocks > 0 and block_size > 0
        self.block_size, self.max_cached = block_size, blocks if max_cached is None else max_cached
        self.uses = [0] * blocks  # number of tables that list each block
        self.blank = list(range(blocks - 1, -1, -1))  # neither used nor cached; taken from the end
        self.block_of: dict[BlockKey, int] = {}
        self.key_of: dict[int, BlockKey] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # cached but unused, the least recently used first
        self.pending: set[BlockKey] = set()  # keys of blocks that some text is being read into

    @property
    def free_blocks(self) -> int:
        return len(self.blank) + len(self.unused)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def extend_keys(self, tokens: Sequence[int], end: int, keys: list[BlockKey]) -> list[BlockKey]:
        """Extend `keys` in place to all blocks that a text's tokens before `end` fill, and return it."""
        size = self.block_size
        for start in range(len(keys) * size, end - size + 1, size):
            content = array("q", tokens[start : start + size]).tobytes()
            keys.append(blake2b((keys[-1] if keys else b"") + content, digest_size=16).digest())
        return keys

    def shared_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Number of a text's first blocks that are cached already."""
        return next((count for count, key in enumerate(keys) if key not in self.block_of), len(keys))

    def awaits(self, keys: Sequence[BlockKey]) -> bool:
        """Whether another text is reading the first block that this one lacks, so that it pays to wait."""
        count = self.shared_blocks(keys)
        return count < len(keys) and keys[count] in self.pending

    def allocate(self, keys: list[BlockKey], tokens: int, spare: int = 0) -> BlockTable | None:
        """Allocate blocks for a text of this many tokens, reusing cached blocks for its beginning.

        `keys` are those of its full blocks before its last token, which is always read: its features predict the next
        token. Return None, and change nothing, if fewer than `spare` free blocks would be left.
        """
        count = self.shared_blocks(keys)
        assert count * self.block_size < tokens, "a text's last token is never shared"
        reused = sum(1 for key in keys[:count] if not self.uses[self.block_of[key]])
        if self.blocks_for(tokens) - count + spare > self.free_blocks - reused:
            return None
        table = BlockTable(keys, count * self.block_size)
        for key in keys[:count]:
            block = self.block_of[key]
            self.unused.pop(block, None)
            self.uses[block] += 1
            table.blocks.append(block)
        table.pending = {key for key in keys[count:] if key not in self.pending and key not in self.block_of}
        self.pending |= table.pending
        self.extend(table, tokens)
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Add blocks for a text of this many tokens; return False, and change nothing, if the pool has too few."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        for _ in range(missing):
            table.blocks.append(self.blank.pop() if self.blank else self._evict())
            self.uses[table.blocks[-1]] = 1
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], read: int) -> None:
        """Record that the first `read` tokens of a text are in its blocks; full blocks become cached."""
        full, before = read // self.block_size, table.read // self.block_size
        table.read = read
        self.extend_keys(tokens, full * self.block_size, table.keys)
        for index in range(before, full):
            key, block = table.keys[index], table.blocks[index]
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key] = block
                self.key_of[block] = key
            if key in table.pending:
                table.pending.remove(key)
                self.pending.remove(key)

    def release(self, table: BlockTable) -> None:
        """Give a text's blocks back. Their content stays cached while there is space."""
        self.pending -= table.pending
        table.pending.clear()
        while table.blocks:  # the last first, since a prefix is more useful than what followed it
            block = table.blocks.pop()
            assert self.uses[block] > 0, "a block is given back once"
            self.uses[block] -= 1
            if not self.uses[block] and block in self.key_of:
                self.unused[block] = None
            elif not self.uses[block]:
                self.blank.append(block)
        while len(self.unused) > self.max_cached:
            self.blank.append(self._evict())
        table.read = 0

    def _evict(self) -> int:
        """Forget the least recently used cached block, and return it."""
        block, _ = self.unused.popitem(last=False)
        del self.block_of[self.key_of.pop(block)]
        return block
