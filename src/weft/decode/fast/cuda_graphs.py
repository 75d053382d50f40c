"""Decoding steps of fixed shape: the same kernels on the same memory for every token.

Such a step can be captured once as a CUDA graph and replayed, which costs the host one call instead of hundreds, and
the next token can be chosen on the device, so that neither waits for the other. Lengths are counted on the device; the
whole cache is there, and a mask, or the kernel itself, keeps to the part that is filled. Without a GPU the same step
runs uncaptured, for tests.

In a pool (`PagedGraphs`) each text that is being written has a slot. What the device needs from step to step stays
there, by slot: the numbers of a text's blocks, which are sent where they change, and its newest token, which is chosen
there, so that a step need not wait until the host has seen what the last one wrote. A step is given slots. Rows are
filled up to one of a few sizes, each of which has a graph, with a slot that nobody has: its rows read and write the
block `nowhere`.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockStore, PagedCache
from weft.decode.fast.cuda import Chunk, CUDAFastPath, PagedFastPath
from weft.decode.fast.products import has_kernels
from weft.decode.sampling import Filters, check_logits, draw, fetch_tokens, greedy, on_device
from weft.errors import ModelError
from weft.models.transformer import Transformer, TransformerState

FIRST_BUCKET = 256  # keys that a step looks at, at least; twice as many when these are filled
AHEAD = 4  # steps that the device may be in front of the host

MIN_BLOCKS_SEEN = 16  # of a text, by a step of the plain model
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a step; beyond, multiples of 64
SLOT, READ, TOKEN = 0, 1, 2  # what a step is given of each row: its slot, how many tokens were read before, the next
Rows = tuple[list[int], list[int], list[int]]  # slots, and what `PagedGraphs.step` is given of each
Captured = tuple[torch.cuda.CUDAGraph, Tensor]  # a graph, and where its result is after a replay


class _Bucket(TransformerState):
    """A state as one step of fixed shape sees it: the first `seen` places, of which each row fills its own part."""

    def __init__(self, state: TransformerState, seen: int):
        super().__init__(state.cache, state.lengths.shape[0], seen, state.source_cache, state.source_mask)
        self.lengths, self.longest, self.read = state.lengths, seen - 1, state.read
        self.even = False  # lengths are known to the device alone

    def advance(self, time: int, lengths: Tensor | None = None) -> None:
        self.lengths.add_(time)


@cache
def _capture_space(device: torch.device) -> tuple[torch.cuda.Stream, Any, torch.cuda.CUDAGraph]:
    """Where graphs of one device are captured: a stream and a memory pool, the same for all; and a graph in it.

    Each stream has libraries' workspaces of its own, so a new one every time would cost memory. Graphs may share their
    memory, because they run one after another, and what one gives out is kept from the others.
    """
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    keeper = torch.cuda.CUDAGraph()  # an empty graph: without any the pool would be closed
    capturing = torch.cuda.graph(keeper, pool, stream, capture_error_mode="thread_local")
    with warnings.catch_warnings(record=True), capturing:
        pass
    return stream, pool, keeper


_warmed_up: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()  # kinds of steps that weights have done


def capture(model: Transformer, kind: Any, work: Callable[[], Tensor], undo: Callable[[], None]) -> Captured:
    """Capture the work as a CUDA graph, after a warm-up, in which everything is compiled and loaded, and which is
    undone. Work of a kind that was warmed up before, with these weights, is captured at once."""
    assert model.decoder is not None
    weights = model.decoder.blocks[0].attention.qkv  # type: ignore[union-attr]
    assert isinstance(weights, nn.Module)
    known = _warmed_up.setdefault(weights, set())
    device = model.embedding.weight.device
    (stream, pool, _), now = _capture_space(device), torch.cuda.current_stream(device)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        if kind not in known:
            work()
            undo()
            known.add(kind)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    now.wait_stream(stream)
    return graph, result


class GraphStep:
    """One more token in every row of a state, over and over: by the CUDA fast path's `kernels`, or else the model.

    `tokens` (batch, 1) is what is read next. With a `sampler` the step ends by putting its choice there. A row that has
    reached its capacity stays in the last place: what it gives then means nothing. The state is kept up to date; after
    `state.reorder` a new GraphStep is needed.
    """

    def __init__(
        self,
        model: Transformer,
        state: TransformerState,
        kernels: CUDAFastPath | None,
        sampler: "DeviceSampler | None" = None,
    ):
        self.model, self.state, self.kernels, self.sampler = model, state, kernels, sampler
        self.device = state.lengths.device
        state.lengths = state.lengths.clone()  # our own, to be counted up in place
        self.tokens = torch.zeros(len(state.lengths), 1, dtype=torch.long, device=self.device)
        self.graphs: dict[int, Captured] = {}

    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Read tokens (batch,), or what the last step chose; logits (batch, vocab_size), overwritten by the next."""
        if tokens is not None:
            self.tokens.copy_(tokens.unsqueeze(1))
        seen = self.state.max_len  # places that this step has to look at; the kernels look at the filled ones only
        if self.kernels is None:
            seen = min(seen, max(FIRST_BUCKET, 1 << self.state.longest.bit_length()))
        if self.device.type != "cuda":
            logits = self._work(seen)
        else:
            if seen not in self.graphs:
                self.graphs[seen] = self._capture(seen)
            graph, logits = self.graphs[seen]
            graph.replay()
        self.state.longest = min(self.state.longest + 1, self.state.max_len)
        return logits

    def run_ahead(self, logits: Tensor, steps: int) -> Iterator[list[int]]:
        """The tokens of all rows, step by step, from the logits (batch, V) after the prompts on; `steps` at most. The
        device works up to a few steps ahead of what is given out, so a caller that stops early has wasted those."""
        sampler = self.sampler
        assert sampler is not None
        self.tokens.copy_(sampler(logits).unsqueeze(1))
        ready: deque[Callable[[], list[int]]] = deque()
        for number in range(steps):
            if number:
                sampler.begun = number
                logits = self()
            ready.append(fetch_tokens(sampler.written[number]))
            if len(ready) > (AHEAD if self.device.type == "cuda" else 0):
                yield _checked(ready.popleft()(), logits, sampler.vocab_size)
        while ready:
            yield _checked(ready.popleft()(), logits, sampler.vocab_size)

    def _work(self, seen: int) -> Tensor:
        self.state.lengths.clamp_(max=self.state.max_len - 1)
        if self.kernels is not None:
            logits = self.kernels.step(self.tokens)
        else:
            logits = self.model.step(self.tokens, _Bucket(self.state, seen))[:, -1]
        if self.sampler is not None:
            self.tokens.copy_(self.sampler(logits).unsqueeze(1))
        return logits

    def _capture(self, seen: int) -> Captured:
        """The work, captured, with tokens and lengths as they were before."""
        tokens, lengths = self.tokens.clone(), self.state.lengths.clone()

        def undo() -> None:
            self.tokens.copy_(tokens)
            self.state.lengths.copy_(lengths)
            if self.sampler is not None:
                self.sampler.count.fill_(self.sampler.begun)

        kind = len(self.tokens), 0 if self.kernels else seen, None if self.sampler is None else self.sampler.kind
        captured = capture(self.model, kind, partial(self._work, seen), undo)
        undo()
        return captured


class DeviceSampler:
    """Chooses the next token of each row on the device, as `sampling.choose_tokens` does, and writes it down.

    What a row draws follows from its rng alone: its numbers for all `steps` are drawn beforehand.
    """

    def __init__(
        self,
        settings: Sequence[Sampling],
        rngs: Sequence[torch.Generator],
        steps: int,
        vocab_size: int,
        device: torch.device,
    ):
        self.vocab_size = vocab_size
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.begun = 0  # the step that is captured, to which `count` goes back after a warm-up
        self.written = torch.zeros(steps, len(settings), dtype=torch.long, device=device)
        drawn = [not each.greedy for each in settings]
        self.any, self.all = any(drawn), all(drawn)
        if self.any:
            self.drawn = on_device(torch.tensor(drawn), device)
            uniforms = torch.zeros(steps, len(settings), dtype=torch.float64)
            for row, rng in enumerate(rngs):
                if drawn[row]:
                    uniforms[:, row] = torch.rand(steps, dtype=torch.float64, generator=rng)
            self.uniforms = on_device(uniforms, device)
        self.filters = Filters(settings, vocab_size, device)
        self.kind = self.any, self.all, *self.filters.kind
        self.by_kernel = device.type == "cuda" and not self.any and has_kernels()

    def __call__(self, logits: Tensor) -> Tensor:
        """The next tokens (batch,) after logits (batch, ≥ vocab_size); −1 is written where none can be chosen."""
        if self.by_kernel:
            from weft.decode.fast import kernels

            tokens = kernels.likeliest(logits, self.vocab_size, self.count, self.written)
            self.count.add_(1)
            return tokens
        logits = logits[:, : self.vocab_size].float()
        best = greedy(logits)
        tokens = best
        if self.any:
            tokens = draw(self.filters(logits), self.uniforms.index_select(0, self.count)[0])
            tokens = tokens if self.all else torch.where(self.drawn, tokens, best)
        fine = logits.amax(dim=-1).isfinite()
        self.written.index_copy_(0, self.count, torch.where(fine, tokens, -1).unsqueeze(0))
        self.count.add_(1)
        return torch.where(fine, tokens, 0)


def _checked(tokens: list[int], logits: Tensor, vocab_size: int) -> list[int]:
    if min(tokens) < 0:
        check_logits(logits[:, :vocab_size])
        raise ModelError("the model gave NaN or infinite logits on the way; its weights are damaged")
    return tokens


class PagedGraphs:
    """Steps of one model over the blocks of one pool, for texts in `slots` slots."""

    def __init__(self, model: Transformer, store: BlockStore, slots: int, kernels: bool):
        device = store.data.device
        self.model, self.store, self.device, self.nobody = model, store, device, slots
        self.tables = torch.full((slots + 1, store.blocks), store.nowhere, dtype=torch.int32, device=device)
        self.newest = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self.kernels = PagedFastPath(model, store, self.tables) if kernels else None
        self.shapes: dict[tuple[int, int], _Shape] = {}
        # Chunks of prompts are bound by products, steps by what they read: beside one another both take less time.
        self.beside = torch.cuda.Stream(device) if kernels and device.type == "cuda" else None

    def place(self, changes: dict[tuple[int, int], int]) -> None:
        """From now on block n of the text in slot s is number changes[s, n]."""
        places = np.array(list(changes)).T
        sent = np.concatenate([places, np.array(list(changes.values()))[None]])
        slots, columns, numbers = on_device(torch.from_numpy(sent), self.device).unbind(0)
        self.tables[slots, columns] = numbers.int()

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """The newest tokens (slots,) of the texts in these slots, which they go on with."""
        self.newest.index_copy_(0, on_device(torch.tensor(slots), self.device), tokens)

    def together(self, rows: Rows, chunks: list[Chunk]) -> Tensor:
        """A step of some rows, and beside it chunks of prompts, by the kernels: features (rows + chunks, d_model)."""
        assert self.kernels is not None and chunks
        if self.beside is None:
            return torch.cat([*([self.step(*rows)] if rows[0] else []), self.kernels.read(chunks)])
        now = torch.cuda.current_stream(self.device)
        self.beside.wait_stream(now)
        features = [self.step(*rows)] if rows[0] else []
        with torch.cuda.stream(self.beside):
            read = self.kernels.read(chunks)
        read.record_stream(now)
        now.wait_stream(self.beside)
        return torch.cat([*features, read])

    def step(self, slots: Sequence[int], reads: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Read one token in each of these slots, after reads[i] others; −1 stands for the newest one on the device.
        Features (slots, d_model), to be used before the next step."""
        rows = len(slots)
        size = next((size for size in SIZES if size >= rows), -(-rows // 64) * 64)
        width = 0  # the kernels look at what is filled alone
        if self.kernels is None:
            blocks = max(MIN_BLOCKS_SEEN, max(reads) // self.store.block_size + 1)
            width = 1 << (blocks - 1).bit_length()  # the power of two that holds so many
        key = size, min(width, self.store.blocks)
        if key not in self.shapes:
            self.shapes[key] = _Shape(self, *key)
        shape = self.shapes[key]
        given = np.zeros((3, size), dtype=np.int64)
        given[SLOT, rows:] = self.nobody
        given[:, :rows] = slots, reads, tokens
        shape.given.copy_(on_device(torch.from_numpy(given), self.device), non_blocking=True)
        if self.device.type != "cuda":
            return shape.work()[:rows]
        if shape.captured is None:
            kind = "paged", *key, self.store.blocks, self.store.block_size
            shape.captured = capture(self.model, kind, shape.work, lambda: None)
        graph, features = shape.captured
        graph.replay()
        return features[:rows]


class _Shape:
    """A step of so many rows; for the plain model, of texts of so many blocks at most."""

    def __init__(self, graphs: PagedGraphs, rows: int, width: int):
        self.graphs, self.width = graphs, width
        self.given = torch.zeros(3, rows, dtype=torch.long, device=graphs.device)
        self.attention = None if graphs.kernels is None else graphs.kernels.attention_of(rows)
        self.captured: Captured | None = None

    def work(self) -> Tensor:
        """The given tokens, read; done twice, it writes the same to the same places."""
        graphs, (slots, reads, tokens) = self.graphs, self.given
        tokens = torch.where(tokens < 0, graphs.newest[slots], tokens)
        if graphs.kernels is not None:
            return graphs.kernels.step(tokens, reads, slots, self.attention)
        cache = PagedCache(graphs.store, graphs.tables[slots, : self.width].long())
        state = TransformerState(cache, len(slots), self.width * graphs.store.block_size, None, None)  # type: ignore[arg-type]
        state.lengths, state.longest = reads, state.max_len - 1
        state.even = False  # lengths are known to the device alone
        return graphs.model.advance(tokens.unsqueeze(1), state)[:, -1]
