"""Which keys a query may see, described once and laid out as each kernel needs it.

An index counts a token from the start of its row. A position may restart with every packed document
(`nn/position.py`). Where context parallelism divides the rows, each process reads ranges of their indices, and its
token 0 is the first index of its first range.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from weft.nn.position import Angles, Position

Ranges = tuple[range, ...]  # ascending, none adjacent to the next; empty where a process reads whole rows

# A dense mask with more entries than this is built in blocks of queries, and rebuilt in the backward pass.
MAX_DENSE_ENTRIES = 2**22
# On a GPU, a mask with more entries than this goes to FlexAttention, which compiles a kernel for every new shape:
# shorter sequences come in many shapes, and their dense masks fit in memory.
MIN_FLEX_ENTRIES = 2**18


def range_slices(ranges: Ranges) -> Iterator[tuple[slice, range]]:
    """Yield each range with the slice of this process's tokens that it covers."""
    begin = 0
    for indices in ranges:
        yield slice(begin, begin + len(indices)), indices
        begin += len(indices)


def slice_ranges(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Ranges of indices covered by tokens [start, stop) of this process."""
    cut = (part[max(0, start - tokens.start) : max(0, stop - tokens.start)] for tokens, part in range_slices(ranges))
    return tuple(part for part in cut if part)


def select_ranges(rows: Tensor, ranges: Ranges) -> Tensor:
    """Concatenate the ranges of rows (batch, time, …) to (batch, tokens, …); without ranges, return whole rows."""
    return torch.cat([rows[:, part.start : part.stop] for part in ranges], dim=1) if ranges else rows


@dataclass(frozen=True)
class Mask:
    """Mask of one attention: queries (batch, time) against keys (batch, source time)."""

    causal: bool  # no query sees a later key
    window: int | None = None  # a query sees the last `window` keys, including its own
    globals: Tensor | None = None  # (batch, source time), True where all queries see a key, whatever the window
    real: Tensor | None = None  # (batch, source time), False where a key is padding
    documents: tuple[Tensor, Tensor] | None = None  # ids of the queries' and the keys' documents, which see no other
    chunks: tuple[Tensor, Tensor] | None = None  # numbers of their chunks (batch or 1, …), which see no other; windowed
    offset: int = 0  # number of cached keys before the first query's own
    indices: Tensor | None = None  # row indices of the queries (batch, time), if not offset … offset + time − 1
    ranges: Ranges = ()  # row indices of the queries where other processes read the rest of every row

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.window is None and self.real is None and self.documents is None

    @property
    def triangular(self) -> bool:
        """Whether this is the lower triangle alone, which kernels can build themselves."""
        return self.plain_causal and not self.offset and not self.ranges

    @property
    def plain_causal(self) -> bool:
        """Causal, with `offset` cached keys visible to every query, or for ranges of queries."""
        return self.causal and all(limit is None for limit in (self.window, self.real, self.documents, self.indices))

    def visible(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query sees each key, by row number, token number of the query and index of the key."""
        index = query + self.offset if self.indices is None else self.indices[row, query]
        for tokens, part in range_slices(self.ranges):  # never together with `indices`
            index = torch.where(query < tokens.start, index, query + (part.start - tokens.start))
        seen = key <= index if self.causal else key >= 0
        if self.window is not None:
            near = key > index - self.window
            if not self.causal:
                near = near & (key < index + self.window)
            seen = seen & (near if self.globals is None else near | self.globals[row, key])
        if self.real is not None:
            seen = seen & self.real[row, key]
        if self.documents is not None:
            seen = seen & (self.documents[0][row, query] == self.documents[1][row, key])
        if self.chunks is not None:
            of_queries, of_keys = self.chunks
            seen = seen & (of_queries[row % len(of_queries), query] == of_keys[row % len(of_keys), key])
        return seen

    @property
    def rows(self) -> int:
        """Number of rows whose masks differ; 1 if all rows share one."""
        documents, chunks = (None if pair is None else pair[0] for pair in (self.documents, self.chunks))
        differing = self.real, self.indices, self.globals, documents, chunks
        return max([1, *[x.shape[0] for x in differing if x is not None]])

    def dense(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Bool mask (rows, 1, time, source time) of the given queries and keys, True where a key is visible."""
        row = torch.arange(self.rows, device=device)[:, None, None]
        query = torch.arange(queries.start, queries.stop, device=device)[None, :, None]
        key = torch.arange(keys.start, keys.stop, device=device)[None, None, :]
        return self.visible(row, query, key).expand(self.rows, -1, -1)[:, None]

    def key_range(self, queries: slice, keys: int) -> slice:
        """Smallest slice of `keys` keys that contains all that these queries can see."""
        if self.indices is not None or self.globals is not None:
            return slice(0, keys)
        first, last = queries.start + self.offset, queries.stop + self.offset
        if self.ranges:
            parts = slice_ranges(self.ranges, queries.start, queries.stop)
            first, last = parts[0].start, parts[-1].stop
        window = keys if self.window is None else self.window
        return slice(max(0, first - window + 1), min(keys, last if self.causal else last + window - 1))


class AttentionMask:
    """Mask between queries and keys at known positions, with the effect of their positions on the scores.

    queries (batch or 1, time), keys (batch or 1, source time): positions; `angles` rotate this call's tokens.
    """

    def __init__(self, mask: Mask, position: Position, queries: Tensor, *, keys: Tensor, angles: Angles | None = None):
        self.mask, self.position, self.angles = mask, position, angles
        self.queries, self.keys = queries, keys
        self._dense: Tensor | None = None
        self._block_mask: Any = None

    def dense(self) -> Tensor | None:
        """Whole mask, built on first use: bool, or float where positions add a bias; None if everything is visible."""
        if self._dense is None:
            self._dense = self.part(slice(0, self.queries.shape[1]), slice(0, self.keys.shape[1]))
        return self._dense

    @property
    def fits_flex_attention(self) -> bool:
        """Whether FlexAttention computes it: on a GPU, for a mask too large to be dense. A text read in chunks has a
        new shape each time, and would be compiled again each time."""
        mask, entries = self.mask, self.queries.shape[1] * self.keys.shape[1]
        simpler = mask.triangular or mask.full or self.position.biases
        chunked = mask.indices is not None or mask.offset > 0
        return self.queries.is_cuda and not simpler and not chunked and entries > MIN_FLEX_ENTRIES

    def prepare(self) -> None:
        """Build what the first layer would build lazily: recomputed layers must not change any state."""
        if self.fits_flex_attention:
            self.block_mask()
        if self.queries.shape[1] * self.keys.shape[1] <= MAX_DENSE_ENTRIES:
            self.dense()

    def with_block_mask(self, build: Callable[[Mask, Tensor, Tensor], Any]) -> "AttentionMask":
        """Copy with FlexAttention's block mask made by `build`, where FlexAttention is used."""
        if not self.fits_flex_attention:
            return self
        copy = AttentionMask(self.mask, self.position, self.queries, keys=self.keys, angles=self.angles)
        copy._block_mask = build(self.mask, self.queries, self.keys)
        return copy

    def without_window(self) -> "AttentionMask":
        """Copy in which every query sees all keys of its text."""
        mask = replace(self.mask, window=None, globals=None)
        return AttentionMask(mask, self.position, self.queries, keys=self.keys, angles=self.angles)

    def part(self, queries: slice, keys: slice) -> Tensor | None:
        """Mask (batch or 1, heads or 1, time, source time) of these queries against these keys."""
        bias = self.position.local_bias(self.queries[:, queries], self.keys[:, keys])
        if self.mask.full:
            return bias
        seen = self.mask.dense(queries, keys, self.queries.device)
        return seen if bias is None else torch.where(seen, bias, float("-inf"))

    def block_mask(self) -> Any:
        """FlexAttention's block mask, built on first use."""
        if self._block_mask is None:
            self._block_mask = build_block_mask(self.mask, self.queries, self.keys)
        return self._block_mask


def build_block_mask(mask: Mask, queries: Tensor, keys: Tensor) -> Any:
    """FlexAttention's block mask between queries (batch or 1, time) and keys (batch or 1, source time)."""
    rows = mask.rows if mask.rows > 1 else None
    sizes = rows, None, queries.shape[1], keys.shape[1]  # every head has the same mask
    return create_block_mask(lambda row, _, query, key: mask.visible(row, query, key), *sizes, device=queries.device)
