"""Requests, and the KV blocks that a Transformer reads them into; requests with a common prefix share blocks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockKey, BlockPool, BlockStore, BlockTable, CacheBits, PagedCache
from weft.decode.fast.cuda import PromptChunk
from weft.decode.fast.cuda_graphs import paged_graphs
from weft.decode.fast.native_step import native_decoder, native_is_faster
from weft.decode.prompt import Prompt
from weft.decode.sampling import on_device
from weft.decode.text import Chunk, Completion, GeneratedText, completion_of
from weft.errors import WeftError
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import TokenHistory

CALL_TOKENS = 16  # padded tokens that cost about as much as another call of the model


@dataclass(frozen=True)
class EngineLimits:
    """Capacity of an engine."""

    blocks: int = 2048  # KV blocks
    block_size: int = 16  # tokens of a block
    rows: int = 256  # texts that are written at a time
    prefill: int | None = None  # prompt tokens that a step reads; None: enough to keep the device busy, but not long
    max_cached_blocks: int | None = None  # of ended texts, kept for others with the same prefix; None: all free ones
    bits: CacheBits | None = None  # of keys and values: half the memory; on a GPU without grouped queries 0.6 the time


class Request(GeneratedText):
    """A requested text: `read` of its `ids` are cached, at most `max_len`; the device has chosen `ahead` more."""

    def __init__(self, number: int, prompt: Prompt, settings: Sampling, *, window: int | None, seed: int):
        super().__init__(prompt, settings, window, seed=seed)
        self.number = number
        self.read = self.ahead = 0
        self.max_len = len(self.ids) + min(self.left, self.until_full) - 1  # the last token is never read
        self.keys: list[BlockKey] = []  # of its full blocks, hashed once
        self.chunks: list[Chunk] = []
        self.ended = False
        self.error: WeftError | None = None

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be chosen."""
        return len(self.ids) + self.ahead - self.read

    @property
    def ends_or_slides(self) -> bool:
        """Whether the tokens that the host has not seen end the text or fill its window: nothing can be read before."""
        return self.ahead > 0 and self.ahead >= min(self.left, self.until_full)

    def completion(self) -> Completion:
        """The whole text, once it has ended."""
        assert self.ended, "the engine is still writing it"
        if self.error is not None:
            raise self.error
        return completion_of(self.chunks, self.prompt)

    def slide(self) -> None:
        super().slide()
        self.keys = []


Work = list[tuple[Request, int]]  # requests, and the number of tokens of each that a step reads


class BlockManager:
    """Allocates KV blocks to requests, and reads their tokens."""

    def __init__(self, model: Transformer, limits: EngineLimits):
        if model.decoder is None or model.encoder is not None:
            model.start(1, 1)  # raises, with the reason why it can't continue a text
        assert model.decoder is not None
        self.model, self.device = model, model.embedding.weight.device
        blocks, rows = limits.blocks, limits.rows
        self.pool = BlockPool(blocks, limits.block_size, limits.max_cached_blocks)
        self.store = BlockStore(model, blocks, limits.block_size, bits=limits.bits)
        self.graphs = paged_graphs(model, self.store, rows)
        self.native = native_decoder(model, self.store)
        self.tables: dict[int, BlockTable] = {}  # by request number
        self.table_rows = np.full((rows, blocks), self.store.nowhere, dtype=np.int64)  # the tables, padded by `nowhere`
        self._changes: dict[tuple[int, int], int] = {}  # blocks by row and column that the graphs don't know yet
        self.row: dict[int, int] = {}  # in `table_rows`, by request number
        self.free_rows = list(range(rows))
        # Rows in one call are padded to the longest. More calls mean less padding, but each multiplies the weights by
        # fewer rows. Measured on a CPU, this many padded tokens cost as much as another call.
        weights, config = sum(parameter.numel() for parameter in model.decoder.parameters()), model.config
        self.step_cost = 2 * weights // (len(model.decoder.blocks) * config.cache_shape[1] * config.cache_shape[2])

    def awaits(self, request: Request) -> bool:
        """Whether another request is reading this one's prefix, so that it pays to wait."""
        return self.pool.awaits(self._keys(request))

    def admit(self, request: Request, spare: int) -> bool:
        """Allocate blocks for a request's ids if `spare` stay free. A cached prefix counts as read."""
        table = self.pool.allocate(self._keys(request), len(request.ids), spare) if self.free_rows else None
        if table is None:
            return False
        self.tables[request.number] = table
        self.row[request.number] = self.free_rows.pop()
        request.read = table.read
        self._record_blocks(request, 0)
        return True

    def extend(self, request: Request, tokens: int) -> bool:
        """Allocate blocks for this many of a request's tokens; return False if the pool has too few."""
        table = self.tables[request.number]
        before = len(table.blocks)
        if not self.pool.extend(table, tokens):
            return False
        if len(table.blocks) > before:
            self._record_blocks(request, before)
        return True

    def read(self, work: Work) -> Tensor:
        """Read the next tokens of each request → features (requests, d_model) after the last one of each."""
        single = [index for index, (_, count) in enumerate(work) if count == 1]
        longer = [index for index, (_, count) in enumerate(work) if count > 1]
        features, order = list[Tensor](), list[int]()
        if self.graphs is not None:
            if self._changes:
                self.graphs.update_tables(self._changes)
                self._changes = {}
            replayed = single if self.graphs.kernels is None else single + longer
            if replayed:
                features.append(self._read_by_graphs([work[index] for index in replayed]))
                order += replayed
        elif self.native is not None:
            if native_is_faster(self.model, sum(count for _, count in work)):
                order = list(range(len(work)))
            elif native_is_faster(self.model, len(single)):
                order = single
            if order:
                features.append(self._read_natively([work[index] for index in order]))
        for group in self._groups(work, sorted({*single, *longer}.difference(order))):
            features.append(self._read_by_model([work[index] for index in group]))
            order = order + group
        size = self.pool.block_size
        for request, count in work:
            request.read += count
            table, known = self.tables[request.number], min(request.read, len(request.ids))
            if known // size > table.read // size:
                self.pool.commit(table, request.ids, known)
        rows = features[0] if len(features) == 1 else torch.cat(features)
        if order == list(range(len(order))):
            return rows
        return rows[on_device(torch.tensor(sorted(range(len(order)), key=order.__getitem__)), rows.device)]

    def head(self, features: Tensor) -> Tensor:
        """Features (requests, d_model) → logits (requests, V)."""
        if self.native is not None and native_is_faster(self.model, len(features)):
            return self.native.head(features)
        return self.model.head(features.unsqueeze(1))[:, 0]

    def set_newest(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Continue requests with these tokens (requests,), which only the device knows so far."""
        assert self.graphs is not None
        self.graphs.set_newest([self.row[request.number] for request in requests], tokens)

    def release(self, request: Request) -> None:
        self.pool.release(self.tables.pop(request.number))
        row = self.row.pop(request.number)
        self.table_rows[row] = self.store.nowhere
        self.free_rows.append(row)
        request.read = 0

    def _keys(self, request: Request) -> list[BlockKey]:
        return self.pool.extend_keys(request.ids, len(request.ids) - 1, request.keys)

    def _record_blocks(self, request: Request, first: int) -> None:
        """Record a request's new blocks, from index `first` of its table on."""
        row, new = self.row[request.number], self.tables[request.number].blocks[first:]
        self.table_rows[row, first : first + len(new)] = new
        if self.graphs is not None:
            self._changes.update(((row, column), block) for column, block in enumerate(new, start=first))

    def _read_by_graphs(self, work: Work) -> Tensor:
        assert self.graphs is not None
        requests = [request for request, count in work if count == 1]
        # −1 where only the device knows the next token
        tokens = [-1 if request.read >= len(request.ids) else request.ids[request.read] for request in requests]
        rows = [self.row[request.number] for request in requests], [request.read for request in requests], tokens
        chunks = [
            PromptChunk(self.row[request.number], request.read, request.ids[request.read : request.read + count])
            for request, count in work[len(requests) :]
        ]
        return self.graphs.step_and_prefill(rows, chunks) if chunks else self.graphs.step(*rows)

    def _read_natively(self, work: Work) -> Tensor:
        assert self.native is not None
        tokens, lengths, counts, tables = self._inputs(work)
        read = self._read_tokens(work, lengths, int(lengths.max()) + tokens.shape[1])
        x = self.model.embed_next(tokens, lengths, read)
        real = torch.arange(tokens.shape[1]) < counts[:, None]
        return self.native(x[real], lengths, tables, counts=counts)[counts.cumsum(0) - 1]

    def _inputs(self, work: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Next tokens (requests, time), padded; the tokens read before, and the number of next ones, (requests,);
        tables (requests, blocks). All on the host."""
        lengths, counts = [request.read for request, _ in work], [count for _, count in work]
        chunks = [request.ids[request.read : request.read + count] for request, count in work]
        time, rows = max(counts), [self.row[request.number] for request, _ in work]
        tokens = torch.tensor([chunk + [0] * (time - len(chunk)) for chunk in chunks])
        tables = torch.from_numpy(self.table_rows[rows, : self.pool.blocks_for(max(lengths) + time)])
        return tokens, torch.tensor(lengths), torch.tensor(counts), tables

    def _read_tokens(self, work: Work, lengths: Tensor, max_len: int) -> TokenHistory | None:
        """The last tokens that requests have read, as far back as n-grams reach; None for models without n-grams."""
        if self.model.ngrams is None:
            return None
        tokens = np.zeros((len(work), max_len), dtype=np.int64)
        for row, (request, _) in enumerate(work):
            start = max(0, request.read - self.model.ngrams.reach)
            tokens[row, start : request.read] = request.ids[start : request.read]
        read = TokenHistory((), lengths, 0)
        read.tokens = on_device(torch.from_numpy(tokens), self.device)
        return read

    def _groups(self, work: Work, indices: Sequence[int]) -> Iterator[list[int]]:
        """Group work into calls of the model: single tokens by context length, chunks by their first position."""
        by_start: dict[int, list[int]] = defaultdict(list)
        for index in indices:
            request, count = work[index]
            by_start[-1 if count == 1 else request.read].append(index)
        for start, members in by_start.items():
            sizes = [work[index][0].read if start < 0 else work[index][1] for index in members]
            yield from split_by_size(members, sizes, self.step_cost if start < 0 else CALL_TOKENS)

    def _read_by_model(self, work: Work) -> Tensor:
        tokens, read, counts, tables = self._inputs(work)
        longest, time = int(read.max()), tokens.shape[1]
        cache = PagedCache(self.store, on_device(tables, self.device))
        state = TransformerState(cache, len(work), longest + time)  # type: ignore[arg-type]
        state.lengths = on_device(read, self.device)
        state.longest, state.even = longest, int(read.min()) == longest
        state.history = self._read_tokens(work, state.lengths, state.max_len)
        lengths = on_device(counts, self.device) if int(counts.min()) < time else None
        features = self.model.advance(on_device(tokens, self.device), state, lengths)
        if lengths is None:
            return features[:, -1]
        return features[torch.arange(len(work), device=self.device), lengths - 1]


def split_by_size(items: Sequence[int], sizes: Sequence[int], cost: float) -> list[list[int]]:
    """Split items into groups, padded to their largest size, wherever a split saves more padding than `cost`."""
    items = list(items)
    largest = max(sizes, default=0)
    if largest * len(items) - sum(sizes) <= cost:
        return [items] if items else []
    order = sorted(range(len(items)), key=sizes.__getitem__)
    cut = max(range(1, len(order)), key=lambda cut: cut * (largest - sizes[order[cut - 1]]))
    if cut * (largest - sizes[order[cut - 1]]) <= cost:
        return [items]
    groups = []
    for half in (sorted(order[:cut]), sorted(order[cut:])):
        groups += split_by_size([items[i] for i in half], [sizes[i] for i in half], cost)
    return groups
