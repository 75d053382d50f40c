"""A Transformer's requests in the blocks of a pool, which they share where they begin alike."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decode.engine.paging import BlockStore, PagedCache
from weft.decode.engine.pool import BlockPool, BlockTable, Key
from weft.decode.engine.reading import CALL, advance, bands, in_order
from weft.decode.engine.requests import Request
from weft.decode.fast.stepper import paged_graphs
from weft.errors import ModelError
from weft.models.transformer import SourceCache, Transformer, TransformerState


class BlockManager:
    """Gives requests their blocks and reads them; those of an encoder–decoder also hold their source's cache.

    At most `rows` requests are in it at a time.
    """

    def __init__(self, model: Transformer, blocks: int, block_size: int, rows: int):
        if model.decoder is None:
            model.start(1, 1)  # which says why it can't
        assert model.decoder is not None
        self.model, self.device = model, model.embedding.weight.device
        self.pool = BlockPool(blocks, block_size)
        self.store = BlockStore(model, blocks, block_size)
        self.graphs = paged_graphs(model, self.store)
        self.tables: dict[int, BlockTable] = {}
        self.sources: dict[int, SourceCache] = {}
        self._joined: tuple[list[int], SourceCache, Tensor] | None = None
        # the tables as the device reads them, a row each; behind a text's blocks stands `nowhere`
        self.numbers = np.full((rows, blocks), self.store.nowhere, dtype=np.int64)
        self.row: dict[int, int] = {}
        self.free_rows = list(range(rows))
        # Rows in one call are as long as the longest of them. More calls mean less padding, but each has fewer rows to
        # multiply with the weights; measured on a CPU, this many padded tokens are worth a call.
        weights = sum(parameter.numel() for parameter in model.decoder.parameters())
        self.toll = 2 * weights // (len(model.decoder.blocks) * model.config.attention.groups * model.config.d_head)

    def check(self, request: Request) -> None:
        """Refuse a request that can never fit."""
        if request.source is not None and self.model.encoder is None:
            raise ModelError("this model continues a text and reads no source; an encoder–decoder does")
        if request.longest > self.pool.capacity:
            raise ModelError(
                f"prompt and max_tokens make {request.longest} tokens, but the cache's capacity is {self.pool.capacity}"
            )

    def awaits(self, request: Request) -> bool:
        """Whether another request is just reading this one's prefix, so that it pays to wait for it."""
        return self.pool.awaits(self._keys(request))

    def admit(self, request: Request, spare: int) -> bool:
        """Give a request blocks for its ids, if `spare` stay free; a prefix that others have read counts as read."""
        if not self.free_rows:
            return False
        table = self.pool.allocate(self._keys(request), len(request.ids), spare)
        if table is None:
            return False
        self.tables[request.number] = table
        self.row[request.number] = self.free_rows.pop()
        request.read = table.read
        extended = self.extend(request, len(request.ids))
        assert extended, "the pool has counted the free blocks before"
        if self.model.encoder is not None:
            try:
                state = self.model.start(1, 1, request.source)
            except BaseException:
                self.release(request)
                raise
            assert state.source_cache is not None
            self.sources[request.number] = state.source_cache
        return True

    def extend(self, request: Request, tokens: int) -> bool:
        """Blocks for so many of its tokens, if there are any; False where the pool has too few."""
        table = self.tables[request.number]
        had = len(table.blocks)
        copies = self.pool.extend(table, tokens)
        if copies is None:
            return False
        if copies or len(table.blocks) > had:
            self.store.copy(copies)
            self.numbers[self.row[request.number], : len(table.blocks)] = table.blocks
        return True

    def read(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """Read on, counts[i] tokens of request i; features (requests, d_model) after the last one of each."""
        features: list[Tensor] = []
        order: list[int] = []
        for group in self._groups(requests, counts):
            features.append(self._read([requests[place] for place in group], [counts[place] for place in group]))
            order += group
        for request in requests:
            self.pool.commit(self.tables[request.number], request.ids, request.read, request.salt)
        return in_order(features, order)

    def release(self, request: Request) -> None:
        """Free its blocks."""
        self.pool.release(self.tables.pop(request.number))
        row = self.row.pop(request.number)
        self.numbers[row] = self.store.nowhere
        self.free_rows.append(row)
        if self.sources.pop(request.number, None) is not None:
            self._joined = None
        request.read = 0

    def _keys(self, request: Request) -> list[Key]:
        return self.pool.keys(request.ids, request.salt, request.keys)

    def _groups(self, requests: Sequence[Request], counts: Sequence[int]) -> Iterator[list[int]]:
        """Requests to be read in one call: single tokens by how far back they look, chunks from equal places on."""
        starts: dict[int, list[int]] = defaultdict(list)
        for place, (request, count) in enumerate(zip(requests, counts, strict=True)):
            starts[-1 if count == 1 else request.read].append(place)
        for start, places in starts.items():
            if start < 0 and self.graphs is not None:
                yield places
            elif start < 0:
                yield from bands(places, [requests[place].read for place in places], self.toll)
            else:
                yield from bands(places, [counts[place] for place in places], CALL)

    def _read(self, requests: list[Request], counts: list[int]) -> Tensor:
        reads = [request.read for request in requests]
        longest, time = max(reads), max(counts)
        rows = [self.row[request.number] for request in requests]
        numbers = self.numbers[rows, : self.pool.blocks_for(longest + time)]
        if self.graphs is not None and time == 1:
            features = self.graphs([request.ids[request.read] for request in requests], reads, numbers)
            for request in requests:
                request.read += 1
            return features
        cache = PagedCache(self.store, torch.from_numpy(numbers).to(self.device))
        state = TransformerState(cache, len(requests), longest + time, *self._source(requests))  # type: ignore[arg-type]
        state.lengths = torch.tensor(reads, device=self.device)
        state.longest, state.even = longest, min(reads) == longest
        return advance(self.model, state, requests, counts)

    def _source(self, requests: Sequence[Request]) -> tuple[SourceCache | None, Tensor | None]:
        """The sources' keys and values in one batch, padded; they change only with the rows."""
        if not self.sources:
            return None, None
        rows = [request.number for request in requests]
        if self._joined is None or self._joined[0] != rows:
            sources = [self.sources[row] for row in rows]
            lengths = [source[0][0].shape[2] for source in sources]
            longest = max(lengths)
            joined = [
                (_stacked([keys for keys, _ in layer], longest), _stacked([values for _, values in layer], longest))
                for layer in zip(*sources, strict=True)
            ]
            mask = torch.arange(longest, device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
            self._joined = rows, joined, mask
        return self._joined[1], self._joined[2]


def _stacked(rows: Sequence[Tensor], time: int) -> Tensor:
    """Keys or values (1, kv_heads, …, d_head) as rows of one (batch, kv_heads, time, d_head)."""
    return torch.cat([pad(row, (0, 0, 0, time - row.shape[2])) for row in rows])
