"""Key–value cache: keys and values of the tokens read so far, computed once."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Past(Protocol):
    """Keys and values of other tokens in one layer; `extend` adds (batch, kv_heads, time, d_head) and returns all."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


class KeyValueCache:
    """Keys and values of every layer: store (layers, 2, batch, kv_heads, max_len, width), the wider one's width. With
    latent attention, store (layers, 1, …) has the vectors from which both are computed."""

    def __init__(self, store: Tensor):
        self.store = store

    def append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row."""
        self.store = F.pad(self.store, (0, 0, 0, positions))

    def reorder(self, index: Tensor, filled: int) -> None:
        """Make row i a copy of row `index[i]` in its first `filled` positions. A CPU copies only the rows that move."""
        layers, parts, batch, *rest = self.store.shape
        index = index.to(self.store.device)
        if self.store.is_cuda:
            self.store = self.store.index_select(2, index)
            return
        if len(index) > batch:
            store = self.store.new_zeros(layers, parts, len(index), *rest)
            store[..., :filled, :] = self.store[..., :filled, :].index_select(2, index)
            self.store = store
            return
        origins = {row: origin for row, origin in enumerate(index.tolist()) if row != origin}
        rows = self.store[..., :filled, :].unbind(2)
        overwritten = {origin: rows[origin].clone() for origin in origins.values() if origin in origins}
        for row, origin in origins.items():
            rows[row].copy_(overwritten.get(origin, rows[origin]))
        self.store = self.store[:, :, : len(index)]

    def layer(self, number: int, indices: Tensor | None, start: int) -> "LayerCache":
        """One layer, to be written at `indices` (batch, time), or from `start` on in every row if None."""
        return LayerCache(self.store[number], indices, start)


class LayerCache:
    """One layer of the cache while new keys and values are added: store (2 or 1, batch, kv_heads, max_len, width)."""

    def __init__(self, store: Tensor, indices: Tensor | None, start: int):
        self.keys, self.values, self.indices, self.start = store[0], store[-1], indices, start

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (batch, kv_heads, time, d_head or d_v); return all of them, up to the longest row."""
        stop = self.start + keys.shape[2]
        all_keys, all_values = self.keys[..., : keys.shape[-1]], self.values[..., : values.shape[-1]]
        if self.indices is None:
            all_keys[:, :, self.start : stop] = keys
            all_values[:, :, self.start : stop] = values
        else:
            row = torch.arange(keys.shape[0], device=keys.device)[:, None]
            all_keys[row, :, self.indices] = keys.transpose(1, 2).to(self.keys.dtype)
            all_values[row, :, self.indices] = values.transpose(1, 2).to(self.values.dtype)
        return all_keys[:, :, :stop], all_values[:, :, :stop]


def stack_padded(keys: Tensor, values: Tensor) -> Tensor:
    """Stack keys and values (…, d_head or d_v) to (2, …, width), the narrower of them padded with zeros."""
    width = max(keys.shape[-1], values.shape[-1])
    return torch.stack([F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (keys, values)])


class TokenHistory:
    """Tokens that rows have read, (batch, max_len), for n-gram embeddings and position encodings that depend on length.

    A row that crosses a length in `switches` is read again from its first token: all keys depend on the angles.
    """

    def __init__(self, switches: Sequence[int], lengths: Tensor, max_len: int):
        self.switches, self.passed = torch.tensor(switches, device=lengths.device), lengths
        self.tokens = lengths.new_zeros(len(lengths), max_len)

    def add(self, tokens: Tensor, lengths: Tensor) -> None:
        """Append tokens (batch, time) to rows of these lengths (batch,)."""
        self.tokens.scatter_(1, lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device), tokens)

    def crosses_switch(self, tokens: Tensor, lengths: Tensor, total: Tensor) -> bool:
        """Append tokens (batch, time) to rows, up to `total` tokens (batch,); return whether one must be read again."""
        self.add(tokens, lengths)
        before, self.passed = self.passed, torch.bucketize(total, self.switches)
        return bool(((self.passed != before) & (lengths > 0)).any())

    def last(self, count: int, lengths: Tensor) -> Tensor:
        """Last `count` tokens (batch, count) of rows of these lengths (batch,); −1 before the beginning."""
        indices = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)
        return self.tokens.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, -1)

    def append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row."""
        self.tokens = F.pad(self.tokens, (0, positions))

    def reorder(self, index: Tensor) -> None:
        """Make row i a copy of row `index[i]`."""
        self.tokens, self.passed = self.tokens[index], self.passed[index]
