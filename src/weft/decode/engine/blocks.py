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
from weft.decode.fast.paged import Chunk
from weft.decode.fast.stepper import paged_graphs
from weft.decode.sampling import on_device
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
        self.graphs = paged_graphs(model, self.store, rows)
        self.tables: dict[int, BlockTable] = {}
        self.sources: dict[int, SourceCache] = {}
        self._joined: tuple[list[int], SourceCache, Tensor] | None = None
        # the tables as arrays, a row each; behind a text's blocks stands `nowhere`
        self.numbers = np.full((rows, blocks), self.store.nowhere, dtype=np.int64)
        self._changes: dict[tuple[int, int], int] = {}  # by row and column, numbers that the graphs don't know yet
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
        copies = self.pool.extend(table, len(request.ids))
        assert copies is not None, "the pool has counted the free blocks before"
        self.store.copy(copies)
        self._name(self.row[request.number], table, 0)
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
        if tokens <= had * self.pool.block_size:  # its own, from the first that will be written into: `admit` saw to it
            return True
        copies = self.pool.extend(table, tokens)
        if copies is None:
            return False
        assert not copies
        self._name(self.row[request.number], table, had)
        return True

    def read(self, requests: Sequence[Request], counts: Sequence[int]) -> Tensor:
        """Read on, counts[i] tokens of request i; features (requests, d_model) after the last one of each."""
        features: list[Tensor] = []
        order: list[int] = []
        left: Sequence[int] = range(len(requests))
        if self.graphs is not None:
            if self._changes:
                self.graphs.place(self._changes)
                self._changes = {}
            done, left = self._by_graphs(requests, counts)
            if done:
                features.append(self._replayed([requests[place] for place in done], [counts[place] for place in done]))
                order += done
        for group in self._groups(requests, counts, left):
            features.append(self._read([requests[place] for place in group], [counts[place] for place in group]))
            order += group
        size = self.pool.block_size
        for request in requests:
            table, known = self.tables[request.number], min(request.read, len(request.ids))
            if known // size > table.read // size:
                self.pool.commit(table, request.ids, known, request.salt)
        return in_order(features, order)

    def keep(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Requests go on with these tokens (requests,), which only the device knows so far."""
        assert self.graphs is not None
        self.graphs.keep([self.row[request.number] for request in requests], tokens)

    @property
    def runs_ahead(self) -> bool:
        """Whether a request's next token can be read before the host knows it."""
        return self.graphs is not None

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

    def _name(self, row: int, table: BlockTable, first: int) -> None:
        """A table's blocks from the first on are new."""
        self.numbers[row, first : len(table.blocks)] = table.blocks[first:]
        if self.graphs is not None:
            self._changes.update(((row, first + at), block) for at, block in enumerate(table.blocks[first:]))

    def _by_graphs(self, requests: Sequence[Request], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The requests that the graphs read, single tokens first, and the others."""
        assert self.graphs is not None
        single = [place for place, count in enumerate(counts) if count == 1]
        longer = [place for place, count in enumerate(counts) if count > 1]
        return (single, longer) if self.graphs.kernels is None else (single + longer, [])

    def _replayed(self, requests: list[Request], counts: list[int]) -> Tensor:
        """Read on by the graphs: single tokens, then chunks."""
        assert self.graphs is not None
        single = counts.count(1)
        rows = [self.row[request.number] for request in requests]
        some = requests[:single]
        # where the host doesn't know the next token yet, it is the newest one on the device
        tokens = [-1 if request.read >= len(request.ids) else request.ids[request.read] for request in some]
        step = rows[:single], [request.read for request in some], tokens
        chunks = [
            Chunk(row, request.read, request.ids[request.read : request.read + count])
            for row, request, count in zip(rows[single:], requests[single:], counts[single:], strict=True)
        ]
        features = self.graphs.together(step, chunks) if chunks else self.graphs.step(*step)
        for request, count in zip(requests, counts, strict=True):
            request.read += count
        return features

    def _groups(self, requests: Sequence[Request], counts: Sequence[int], places: Sequence[int]) -> Iterator[list[int]]:
        """Requests to be read in one call: single tokens by how far back they look, chunks from equal places on."""
        starts: dict[int, list[int]] = defaultdict(list)
        for place in places:
            starts[-1 if counts[place] == 1 else requests[place].read].append(place)
        for start, places in starts.items():
            if start < 0:
                yield from bands(places, [requests[place].read for place in places], self.toll)
            else:
                yield from bands(places, [counts[place] for place in places], CALL)

    def _read(self, requests: list[Request], counts: list[int]) -> Tensor:
        reads = [request.read for request in requests]
        longest, time = max(reads), max(counts)
        rows = [self.row[request.number] for request in requests]
        numbers = self.numbers[rows, : self.pool.blocks_for(longest + time)]
        cache = PagedCache(self.store, on_device(torch.from_numpy(numbers), self.device))
        state = TransformerState(cache, len(requests), longest + time, *self._source(requests))  # type: ignore[arg-type]
        state.lengths = on_device(torch.tensor(reads), self.device)
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
