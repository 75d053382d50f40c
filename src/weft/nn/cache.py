"""Keys and values of the tokens that were read, so that they are computed once."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Past(Protocol):
    """Keys and values of other tokens than these, in one layer: those before them, or those that other processes read
    of the same rows (`Stack.context`)."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add these (batch, kv_heads, time, d_head); returns all of them, up to the longest row."""


class KeyValueCache:
    """Keys and values of every layer and row: store (layers, 2, batch, kv_heads, max_len, d_head), allocated once."""

    def __init__(self, store: Tensor):
        self.store = store

    def append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row."""
        self.store = F.pad(self.store, (0, 0, 0, positions))

    def reorder(self, index: Tensor, filled: int) -> None:
        """Row i becomes a copy of row index[i], in its first `filled` places. On a CPU the rows that stay are not
        touched."""
        layers, two, batch, *rest = self.store.shape
        index = index.to(self.store.device)
        if self.store.is_cuda:
            self.store = self.store.index_select(2, index)
            return
        if len(index) > batch:
            wider = self.store.new_zeros(layers, two, len(index), *rest)
            wider[..., :filled, :] = self.store[..., :filled, :].index_select(2, index)
            self.store = wider
            return
        moved = {row: origin for row, origin in enumerate(index.tolist()) if row != origin}
        rows = self.store[..., :filled, :].unbind(2)
        kept = {origin: rows[origin].clone() for origin in moved.values() if origin in moved}
        for row, origin in moved.items():
            rows[row].copy_(kept.get(origin, rows[origin]))
        self.store = self.store[:, :, : len(index)]

    def layer(self, number: int, places: Tensor | None, start: int) -> "LayerCache":
        """One layer, about to be written at `places` (batch, time), or from `start` on in every row if None."""
        return LayerCache(self.store[number, 0], self.store[number, 1], places, start)


class LayerCache:
    """One layer's keys and values while new ones come in: (batch, kv_heads, max_len, d_head) each."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor | None, start: int):
        self.keys, self.values, self.places, self.start = keys, values, places, start

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write these (batch, kv_heads, time, d_head) and return all up to the longest row."""
        stop = self.start + keys.shape[2]
        if self.places is None:
            self.keys[:, :, self.start : stop] = keys
            self.values[:, :, self.start : stop] = values
        else:
            row = torch.arange(keys.shape[0], device=keys.device)[:, None]
            self.keys[row, :, self.places] = keys.transpose(1, 2).to(self.keys.dtype)
            self.values[row, :, self.places] = values.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class ReadTokens:
    """The tokens that rows have read, (batch, max_len): what n-grams are made of; and of a model that reads texts above
    some lengths, `switches`, by other angles, what is read again. Keys and values in every layer depend on angles, so
    that a text that has passed one of these lengths begins anew."""

    def __init__(self, switches: Sequence[int], lengths: Tensor, max_len: int):
        self.switches, self.passed = torch.tensor(switches, device=lengths.device), lengths
        self.tokens = lengths.new_zeros(len(lengths), max_len)

    def add(self, tokens: Tensor, lengths: Tensor) -> None:
        """Rows of these lengths (batch,) grow by tokens (batch, time)."""
        self.tokens.scatter_(1, lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device), tokens)

    def passes(self, tokens: Tensor, lengths: Tensor, total: Tensor) -> bool:
        """Rows of these lengths grow by tokens (batch, time), which count up to `total`, all (batch,). True if what a
        row has read before was read by other angles than it is now."""
        self.add(tokens, lengths)
        before, self.passed = self.passed, torch.bucketize(total, self.switches)
        return bool(((self.passed != before) & (lengths > 0)).any())

    def last(self, count: int, lengths: Tensor) -> Tensor:
        """The last `count` tokens of rows of these lengths (batch,), (batch, count); −1 where there are none."""
        places = lengths[:, None] + torch.arange(-count, 0, device=lengths.device)
        return self.tokens.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)

    def append(self, positions: int) -> None:
        """Reallocate with this many more zeroed positions per row."""
        self.tokens = F.pad(self.tokens, (0, positions))

    def reorder(self, index: Tensor) -> None:
        """Row i becomes a copy of row index[i]."""
        self.tokens, self.passed = self.tokens[index], self.passed[index]
