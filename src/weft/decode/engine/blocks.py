"""Requests, and the blocks of a pool that a Transformer reads them into, which they share where they begin alike."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockPool, BlockStore, BlockTable, CacheBits, Key, PagedCache
from weft.decode.fast.cuda import Chunk
from weft.decode.fast.native_step import reading_pays
from weft.decode.fast.stepper import native_rows, paged_graphs
from weft.decode.prompt import Prompt
from weft.decode.sampling import on_device
from weft.decode.text import Chunk as Written
from weft.decode.text import Completion, GeneratedText, completion_of
from weft.errors import WeftError
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import ReadTokens

CALL = 16  # a call of the model costs about as much as reading so many tokens more in one that is made anyway


@dataclass(frozen=True)
class Limits:
    """What an engine holds at a time.

    At most `rows` texts are written at a time, in `blocks` blocks of `block_size` tokens. At most `prefill` tokens of
    prompts are read in one step; None: as many as keep the device busy without holding the other texts up for long.
    `kept` blocks of texts that have ended may serve others that begin alike; None: all that are free. With `bits`, keys
    and values have so many: half of the memory, and on a GPU 0.6 of the time, where no heads share them.
    """

    blocks: int = 2048
    block_size: int = 16
    rows: int = 256
    prefill: int | None = None
    kept: int | None = None
    bits: CacheBits | None = None


class Request(GeneratedText):
    """A text that was asked for. `read` of its `ids` are in the cache, which never holds more than `longest` of them.

    After its ids come `ahead` more, which the device has chosen and the host hasn't seen yet.
    """

    def __init__(self, number: int, prompt: Prompt, settings: Sampling, window: int | None, seed: int):
        super().__init__(prompt, settings, window, seed=seed)
        self.number = number
        self.read = self.ahead = 0
        self.longest = len(self.ids) + min(self.left, self.until_full) - 1  # the last one is never read
        self.keys: list[Key] = []  # of its full blocks, hashed once
        self.chunks: list[Written] = []
        self.ended = False
        self.error: WeftError | None = None

    @property
    def unread(self) -> int:
        """Tokens that have to be read before the next one can be chosen."""
        return len(self.ids) + self.ahead - self.read

    @property
    def ends_or_slides(self) -> bool:
        """Whether what the host hasn't seen yet ends it or fills its window: nothing can be read before that."""
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


Work = list[tuple[Request, int]]  # how many tokens of which requests are read in a step


class BlockManager:
    """Gives requests their blocks and reads them."""

    def __init__(self, model: Transformer, limits: Limits):
        if model.decoder is None or model.encoder is not None:
            model.start(1, 1)  # which says why it can't continue a text
        assert model.decoder is not None
        self.model, self.device = model, model.embedding.weight.device
        blocks, rows = limits.blocks, limits.rows
        self.pool = BlockPool(blocks, limits.block_size, limits.kept)
        self.store = BlockStore(model, blocks, limits.block_size, limits.bits)
        self.graphs = paged_graphs(model, self.store, rows)
        self.native = native_rows(model, self.store)
        self.tables: dict[int, BlockTable] = {}
        # the tables as arrays, a row each; behind a text's blocks stands `nowhere`
        self.numbers = np.full((rows, blocks), self.store.nowhere, dtype=np.int64)
        self._changes: dict[tuple[int, int], int] = {}  # by row and column, numbers that the graphs don't know yet
        self.row: dict[int, int] = {}
        self.free_rows = list(range(rows))
        # Rows in one call are as long as the longest of them. More calls mean less padding, but each has fewer rows to
        # multiply with the weights; measured on a CPU, this many padded tokens are worth a call.
        weights = sum(parameter.numel() for parameter in model.decoder.parameters())
        self.toll = 2 * weights // (len(model.decoder.blocks) * model.config.attention.groups * model.config.d_head)

    def awaits(self, request: Request) -> bool:
        """Whether another request is just reading this one's prefix, so that it pays to wait for it."""
        return self.pool.awaits(self._keys(request))

    def admit(self, request: Request, spare: int) -> bool:
        """Give a request blocks for its ids, if `spare` stay free; a prefix that others have read counts as read."""
        table = self.pool.allocate(self._keys(request), len(request.ids), spare) if self.free_rows else None
        if table is None:
            return False
        self.tables[request.number] = table
        self.row[request.number] = self.free_rows.pop()
        request.read = table.read
        self._name(request, 0)
        return True

    def extend(self, request: Request, tokens: int) -> bool:
        """Blocks for so many of its tokens, if there are any; False where the pool has too few."""
        table = self.tables[request.number]
        had = len(table.blocks)
        if not self.pool.extend(table, tokens):
            return False
        if len(table.blocks) > had:
            self._name(request, had)
        return True

    def read(self, work: Work) -> Tensor:
        """Read on, so many tokens of each request; features (requests, d_model) after the last one of each."""
        single = [place for place, (_, count) in enumerate(work) if count == 1]
        longer = [place for place, (_, count) in enumerate(work) if count > 1]
        features: list[Tensor] = []
        order: list[int] = []
        if self.graphs is not None:
            if self._changes:
                self.graphs.place(self._changes)
                self._changes = {}
            replayed = single if self.graphs.kernels is None else single + longer
            if replayed:
                features.append(self._replayed([work[place] for place in replayed]))
                order += replayed
        elif self.native is not None:
            both = reading_pays(self.model, sum(count for _, count in work))
            order = list(range(len(work))) if both else single if reading_pays(self.model, len(single)) else []
            if order:
                features.append(self._natively([work[place] for place in order]))
        for group in self._groups(work, sorted({*single, *longer}.difference(order))):
            features.append(self._read([work[place] for place in group]))
            order += group
        size = self.pool.block_size
        for request, count in work:
            request.read += count
            table, known = self.tables[request.number], min(request.read, len(request.ids))
            if known // size > table.read // size:
                self.pool.commit(table, request.ids, known)
        rows = features[0] if len(features) == 1 else torch.cat(features)
        if order == list(range(len(order))):
            return rows
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows[on_device(torch.tensor(back), rows.device)]

    def head(self, features: Tensor) -> Tensor:
        """Features (requests, d_model) → logits (requests, V)."""
        if self.native is not None and reading_pays(self.model, len(features)):
            return self.native.head(features)
        return self.model.head(features.unsqueeze(1))[:, 0]

    def keep(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Requests go on with these tokens (requests,), which only the device knows so far."""
        assert self.graphs is not None
        self.graphs.keep([self.row[request.number] for request in requests], tokens)

    def release(self, request: Request) -> None:
        self.pool.release(self.tables.pop(request.number))
        row = self.row.pop(request.number)
        self.numbers[row] = self.store.nowhere
        self.free_rows.append(row)
        request.read = 0

    def _keys(self, request: Request) -> list[Key]:
        return self.pool.keys(request.ids, len(request.ids) - 1, request.keys)

    def _name(self, request: Request, first: int) -> None:
        """A request's blocks from the first on are new."""
        row, new = self.row[request.number], self.tables[request.number].blocks[first:]
        self.numbers[row, first : first + len(new)] = new
        if self.graphs is not None:
            self._changes.update(((row, first + at), block) for at, block in enumerate(new))

    def _replayed(self, work: Work) -> Tensor:
        assert self.graphs is not None
        some = [request for request, count in work if count == 1]
        # where the host doesn't know the next token yet, it is the newest one on the device
        tokens = [-1 if request.read >= len(request.ids) else request.ids[request.read] for request in some]
        step = [self.row[request.number] for request in some], [request.read for request in some], tokens
        chunks = [
            Chunk(self.row[request.number], request.read, request.ids[request.read : request.read + count])
            for request, count in work[len(some) :]
        ]
        return self.graphs.together(step, chunks) if chunks else self.graphs.step(*step)

    def _natively(self, work: Work) -> Tensor:
        """By the step in C: all in one call."""
        assert self.native is not None
        tokens, lengths, counts, tables = self._given(work)
        longest = int(lengths.max()) + tokens.shape[1]
        x = self.model.embed_next(
            tokens, lengths, self._read_before([request for request, _ in work], lengths, longest)
        )
        real = torch.arange(tokens.shape[1]) < counts[:, None]
        return self.native(x[real], lengths, tables, counts)[counts.cumsum(0) - 1]

    def _given(self, work: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (requests, time), padded where they are unequal; how many were read before them, and how many they
        are (requests,); tables (requests, blocks). All on the host."""
        reads, counts = [request.read for request, _ in work], [count for _, count in work]
        chunks = [request.ids[request.read : request.read + count] for request, count in work]
        time, rows = max(counts), [self.row[request.number] for request, _ in work]
        tokens = torch.tensor([chunk + [0] * (time - len(chunk)) for chunk in chunks])
        tables = torch.from_numpy(self.numbers[rows, : self.pool.blocks_for(max(reads) + time)])
        return tokens, torch.tensor(reads), torch.tensor(counts), tables

    def _read_before(self, requests: Sequence[Request], lengths: Tensor, max_len: int) -> ReadTokens | None:
        """The last tokens that requests have read, so many as n-grams reach back."""
        if self.model.ngrams is None:
            return None
        found = np.zeros((len(requests), max_len), dtype=np.int64)
        for row, request in enumerate(requests):
            start = max(0, request.read - self.model.ngrams.reach)
            found[row, start : request.read] = request.ids[start : request.read]
        read = ReadTokens((), lengths, 0)
        read.tokens = on_device(torch.from_numpy(found), self.device)
        return read

    def _groups(self, work: Work, places: Sequence[int]) -> Iterator[list[int]]:
        """What is read in one call: single tokens by how far back they look, chunks from equal places on."""
        starts: dict[int, list[int]] = defaultdict(list)
        for place in places:
            request, count = work[place]
            starts[-1 if count == 1 else request.read].append(place)
        for start, places in starts.items():
            sizes = [work[place][0].read if start < 0 else work[place][1] for place in places]
            yield from bands(places, sizes, self.toll if start < 0 else CALL)

    def _read(self, work: Work) -> Tensor:
        """By the model: one call for all."""
        tokens, reads, counts, tables = self._given(work)
        longest, time = int(reads.max()), tokens.shape[1]
        cache = PagedCache(self.store, on_device(tables, self.device))
        state = TransformerState(cache, len(work), longest + time, None, None)  # type: ignore[arg-type]
        state.lengths = on_device(reads, self.device)
        state.longest, state.even = longest, int(reads.min()) == longest
        state.read = self._read_before([request for request, _ in work], state.lengths, state.max_len)
        lengths = on_device(counts, self.device) if int(counts.min()) < time else None
        features = self.model.advance(on_device(tokens, self.device), state, lengths)
        if lengths is None:
            return features[:, -1]
        return features[torch.arange(len(work), device=self.device), lengths - 1]


def bands(places: Sequence[int], sizes: Sequence[int], toll: float) -> list[list[int]]:
    """Places, which have these sizes, cut into groups where the padding that is saved is worth `toll` for each cut."""
    places = list(places)
    longest = max(sizes, default=0)
    if longest * len(places) - sum(sizes) <= toll:
        return [places] if places else []
    order = sorted(range(len(places)), key=sizes.__getitem__)
    cut = max(range(1, len(order)), key=lambda cut: cut * (longest - sizes[order[cut - 1]]))
    if cut * (longest - sizes[order[cut - 1]]) <= toll:
        return [places]
    halves = sorted(order[:cut]), sorted(order[cut:])
    return [band for half in halves for band in bands([places[i] for i in half], [sizes[i] for i in half], toll)]
