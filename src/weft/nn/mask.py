"""Which keys a query may see, described once and laid out as each kernel needs it.

A place is the index of a token in its row, counted from the row's start; positions, which may restart with every
packed document, are another matter (`nn/position.py`). Where several processes divide every row among them, each reads
ranges of its places: token 0 is then the first place of the first range.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from weft.nn.position import Position

Ranges = tuple[range, ...]  # in order, none touching the next; empty where a process reads whole rows


def spans(ranges: Ranges) -> Iterator[tuple[slice, range]]:
    """Which tokens are those of a range, and the range, one after the other."""
    begin = 0
    for each in ranges:
        yield slice(begin, begin + len(each)), each
        begin += len(each)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The ranges of tokens start … stop − 1."""
    cut = (each[max(0, start - own.start) : max(0, stop - own.start)] for own, each in spans(ranges))
    return tuple(each for each in cut if each)


def taken(rows: Tensor, ranges: Ranges) -> Tensor:
    """The ranges of rows (batch, time, …) as (batch, tokens, …); whole rows as they are."""
    return torch.cat([rows[:, each.start : each.stop] for each in ranges], dim=1) if ranges else rows


@dataclass(frozen=True)
class Mask:
    """The mask of one attention: query (batch, time) against key (batch, source time).

    causal: no query sees a later key, except inside the prefix.
    window: a query sees the last `window` keys, its own among them.
    prefix (batch,): the first so many keys are seen by all (prefix LM; Raffel et al. 2020, §3.2.1).
    real (batch, source time): False where a key is padding.
    documents: ids of the query's and the key's document, (batch, time) and (batch, source time); packed
        documents never see each other.
    offset: so many keys come before the first query's own, those of a cache.
    places (batch, time): the queries' own, if not offset … offset + time − 1 in every row.
    ranges: the queries' own in every row, where other processes have the rest of it.
    """

    causal: bool
    window: int | None = None
    prefix: Tensor | None = None
    real: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None
    offset: int = 0
    places: Tensor | None = None
    ranges: Ranges = ()

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return not self.causal and self.window is None and self.real is None and self.documents is None

    @property
    def triangular(self) -> bool:
        """The lower triangle and nothing else, which kernels draw for themselves."""
        return self.continued and not self.offset and not self.ranges

    @property
    def continued(self) -> bool:
        """The same with `offset` keys before the triangle, which all queries see; or ranges of queries, each so."""
        extra = (self.window, self.prefix, self.real, self.documents, self.places)
        return self.causal and all(e is None for e in extra)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The mask as a function of indices (row, head, query, key), as FlexAttention takes it."""

        def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = self._place(row, query)
            seen = key <= place if self.causal else key >= 0
            if self.window is not None:
                seen = seen & (key > place - self.window)
                if not self.causal:
                    seen = seen & (key < place + self.window)
            if self.prefix is not None:
                seen = seen | (key < self.prefix[row])
            if self.real is not None:
                seen = seen & self.real[row, key]
            if self.documents is not None:
                seen = seen & (self.documents[0][row, query] == self.documents[1][row, key])
            return seen

        return mask_mod

    def _place(self, row: Tensor, query: Tensor) -> Tensor:
        if self.places is not None:
            return self.places[row, query]
        place = query + self.offset
        for own, each in spans(self.ranges):
            place = torch.where(query < own.start, place, query + (each.start - own.start))
        return place

    @property
    def rows(self) -> int:
        """Rows that have masks of their own."""
        documents = None if self.documents is None else self.documents[0]
        return max([1, *[p.shape[0] for p in (self.prefix, self.real, self.places, documents) if p is not None]])

    def dense(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """The mask of some queries and keys as bools (rows, 1, time, source time), True where a key is seen."""
        row = torch.arange(self.rows, device=device)[:, None, None]
        query = torch.arange(queries.start, queries.stop, device=device)[None, :, None]
        key = torch.arange(keys.start, keys.stop, device=device)[None, None, :]
        return self.mask_mod()(row, row, query, key).expand(self.rows, -1, -1)[:, None]

    def key_range(self, queries: slice, keys: int) -> slice:
        """The keys, of so many, that neighbouring queries can see at most; all, once places are not plain indices."""
        if self.places is not None or self.prefix is not None:
            return slice(0, keys)
        first, last = queries.start + self.offset, queries.stop + self.offset
        if self.ranges:
            found = within(self.ranges, queries.start, queries.stop)
            first, last = found[0].start, found[-1].stop
        window = keys if self.window is None else self.window
        return slice(max(0, first - window + 1), min(keys, last if self.causal else last + window - 1))


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
        self, mask: Mask, position: Position, queries: Tensor, keys: Tensor, angles: tuple[Tensor, Tensor] | None = None
    ):
        self.mask, self.position, self.angles = mask, position, angles
        self.queries, self.keys = queries, keys
        self._dense: Tensor | None = None
        self._blocks: Any = None

    def dense(self) -> Tensor | None:
        """The whole mask at once, made when the first layer needs it: bool, or floats where positions add a bias. None
        where every query sees every key."""
        if self._dense is None:
            self._dense = self.part(slice(0, self.queries.shape[1]), slice(0, self.keys.shape[1]))
        return self._dense

    @property
    def flexes(self) -> bool:
        """Whether FlexAttention's kernels fit: on a GPU, for a mask too large to be laid out. A text that is read piece
        by piece meets a new shape each time, and is left to others."""
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
