"""Which keys a query may see, described once and laid out as each kernel needs it.

A place is the index of a token in its row, counted from the row's start; positions, which may restart with every
packed document, are another matter (`nn/position.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.nn.ranges import Ranges, spans, within


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
