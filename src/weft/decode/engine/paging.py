"""Keys and values in blocks of a fixed pool, so that texts of any length share one piece of memory (Kwon et al. 2023).

A row's text lies in blocks that need not be neighbours; its block table says where. `BlockPool` decides which block
belongs to which text: use counts, shared prefixes, and blocks that wait to be used again. A block that is full is known
by a key, a hash of its own tokens and of all before them. Another text with the same prefix uses the same block instead
of reading those tokens again. A known block that no text uses keeps its content until the block is needed; the one that
was used longest ago goes first.
Keys and values are kept as they are, or in 8 bits: whole numbers, with a scale for what a head keeps of a token.
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

from weft.decode.fast.rounding import quantize_vectors
from weft.models.transformer import Transformer

Key = bytes
CacheBits = Literal["int8"]
SCALE = torch.bfloat16  # the type of a vector's scale


def block_bytes(model: Transformer, block_size: int, bits: CacheBits | None = None) -> int:
    """Bytes of the keys and values of `block_size` tokens in all layers."""
    assert model.decoder is not None
    config, width = model.config, model.embedding.weight.dtype.itemsize
    vector = config.d_head * width if bits is None else config.d_head + SCALE.itemsize
    return 2 * len(model.decoder.blocks) * config.attention.groups * block_size * vector


class BlockStore:
    """A Transformer's blocks: data (layers, blocks + 1, 2, kv_heads, block_size, d_head), allocated once. In 8 bits,
    `scales` (layers, blocks + 1, 2, kv_heads, block_size) belong to them.

    The block after the last, `nowhere`, takes what is written at places that a table has no block for: padding.
    """

    def __init__(self, model: Transformer, blocks: int, block_size: int, bits: CacheBits | None = None):
        assert model.decoder is not None
        config, table = model.config, model.embedding.weight
        shape = (len(model.decoder.blocks), blocks + 1, 2, config.attention.groups, block_size, config.d_head)
        self.data = _zeros(shape, table.dtype if bits is None else torch.int8, table.device)
        self.scales = None if bits is None else _zeros(shape[:-1], SCALE, table.device)
        self.blocks, self.block_size, self.nowhere = blocks, block_size, blocks
        self._gathered = self.data.new_empty(0)

    def layer(self, number: int) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Keys and values (blocks, kv_heads, block_size, d_head) and, in 8 bits, the scales of both."""
        keys, values = self.data[number].unbind(1)
        return keys, values, (None, None) if self.scales is None else self.scales[number].unbind(1)

    def gathered(self, size: int) -> Tensor | None:
        """Space for so many numbers that rows read. A step uses it at once, so one piece serves all. None on a GPU: its
        allocator is quick, and a graph must find its memory again when this piece has moved."""
        if self.data.is_cuda:
            return None
        if self._gathered.numel() < size:
            self._gathered = self.data.new_empty(size + size // 4)
        return self._gathered[:size]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)  # memory that is taken only as it is written
    return torch.from_numpy(zeros).view(dtype).view(shape)


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
        scales = self.blocks.scales
        return PagedLayer(self, self.store[number], None if scales is None else scales[number], places, start)

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
    """One layer's blocks (blocks, 2, kv_heads, block_size, d_head) while new keys and values come in; in 8 bits with
    their scales."""

    cache: PagedCache
    store: Tensor
    scales: Tensor | None
    places: Tensor | None
    start: int

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write these (batch, kv_heads, time, d_head) and give all up to the longest row."""
        B, H, T, D = keys.shape
        slots, reach = self.cache.indices(self.places, self.start, T)
        new, kind = torch.stack((keys, values)), keys.dtype
        if self.scales is not None:
            new, scales = quantize_vectors(new)
            self.scales.view(-1).index_copy_(0, slots, scales.flatten())
        self.store.view(-1, D).index_copy_(0, slots, new.to(self.store.dtype).view(-1, D))
        # one head's part of a block lies together, so that this one copy is already as attention wants it
        stretches = self.store.view(-1, self.cache.blocks.block_size * D)
        place = self.cache.blocks.gathered(len(reach) * stretches.shape[1])
        seen = torch.index_select(stretches, 0, reach, out=None if place is None else place.view(len(reach), -1))
        if self.scales is not None:
            scales = self.scales.view(-1, self.cache.blocks.block_size).index_select(0, reach)
            seen = seen.view(-1, D).to(kind) * scales.view(-1, 1).to(kind)
        keys, values = seen.view(2, B, H, -1, D)[:, :, :, : self.start + T]
        return keys, values


@dataclass
class BlockTable:
    """The blocks of one text, in order. `keys` are those of its full blocks; `read` tokens of it are in the blocks.

    `pending` are the keys of blocks that this text is the first to read.
    """

    keys: list[Key]
    read: int
    blocks: list[int] = field(default_factory=list)
    pending: set[Key] = field(default_factory=set)


class BlockPool:
    """`blocks` blocks for `block_size` tokens each. It is all numbers: the content lies in a `BlockStore`.

    At most `kept` of those that no text uses any more stay known, the latest.
    """

    def __init__(self, blocks: int, block_size: int, kept: int | None = None):
        assert blocks > 0 and block_size > 0
        self.block_size, self.kept = block_size, blocks if kept is None else kept
        self.uses = [0] * blocks  # how many tables name each block
        self.blank = list(range(blocks - 1, -1, -1))  # neither used nor known; the next one is the last
        self.known: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # known but unused, the longest unused first
        self.pending: set[Key] = set()  # keys of blocks that some text is being read into

    @property
    def free_blocks(self) -> int:
        return len(self.blank) + len(self.unused)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def keys(self, tokens: Sequence[int], end: int, known: list[Key]) -> list[Key]:
        """The keys of all blocks that a text's tokens before `end` fill; `known` are the first of them."""
        size = self.block_size
        for start in range(len(known) * size, end - size + 1, size):
            content = array("q", tokens[start : start + size]).tobytes()
            known.append(blake2b((known[-1] if known else b"") + content, digest_size=16).digest())
        return known

    def shared(self, keys: Sequence[Key]) -> int:
        """How many of a text's first blocks are here already."""
        return next((count for count, key in enumerate(keys) if key not in self.known), len(keys))

    def awaits(self, keys: Sequence[Key]) -> bool:
        """Whether the next block that this text lacks is being read just now, so that it pays to wait for it."""
        count = self.shared(keys)
        return count < len(keys) and keys[count] in self.pending

    def allocate(self, keys: list[Key], tokens: int, spare: int = 0) -> BlockTable | None:
        """A block table for a text of so many tokens, which begins with blocks that are known already.

        `keys` are those of its full blocks before its last token: what follows a text is known only by reading that
        one. None, and nothing changed, where fewer than `spare` free blocks would be left.
        """
        count = self.shared(keys)
        assert count * self.block_size < tokens, "a text's last token is never shared"
        woken = sum(1 for key in keys[:count] if not self.uses[self.known[key]])
        if self.blocks_for(tokens) - count + spare > self.free_blocks - woken:
            return None
        table = BlockTable(keys, count * self.block_size)
        for key in keys[:count]:
            block = self.known[key]
            self.unused.pop(block, None)
            self.uses[block] += 1
            table.blocks.append(block)
        table.pending = {key for key in keys[count:] if key not in self.pending and key not in self.known}
        self.pending |= table.pending
        self.extend(table, tokens)
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Let a text grow to so many tokens; False, and nothing changed, where the pool has too few blocks."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        table.blocks += [self._take() for _ in range(missing)]
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], read: int) -> None:
        """The first `read` of a text's tokens are in its blocks now; those that are full become known."""
        full, before = read // self.block_size, table.read // self.block_size
        table.read = read
        if full == before:
            return
        self.keys(tokens, full * self.block_size, table.keys)
        for place in range(before, full):
            key, block = table.keys[place], table.blocks[place]
            if key not in self.known and block not in self.key_of:
                self.known[key] = block
                self.key_of[block] = key
            if key in table.pending:
                table.pending.remove(key)
                self.pending.remove(key)

    def release(self, table: BlockTable) -> None:
        """The text needs its blocks no more; what is known in them may serve others."""
        self.pending -= table.pending
        table.pending.clear()
        while table.blocks:  # the last first: a prefix is worth more than what followed it
            block = table.blocks.pop()
            assert self.uses[block] > 0, "a block is given back once"
            self.uses[block] -= 1
            if not self.uses[block] and block in self.key_of:
                self.unused[block] = None
            elif not self.uses[block]:
                self.blank.append(block)
        while len(self.unused) > self.kept:
            self.blank.append(self._forgotten())
        table.read = 0

    def _take(self) -> int:
        block = self.blank.pop() if self.blank else self._forgotten()
        self.uses[block] = 1
        return block

    def _forgotten(self) -> int:
        """The block that has been unused for longest, no longer known."""
        block, _ = self.unused.popitem(last=False)
        del self.known[self.key_of.pop(block)]
        return block
