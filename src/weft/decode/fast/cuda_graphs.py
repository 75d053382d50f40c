"""Decode steps of fixed shape: the same kernels on the same memory for every token.

Such a step is captured once as a CUDA graph and replayed, which costs the host one call instead of hundreds. The next
token can be chosen on the device, so that host and device don't wait for each other. Lengths are counted on the device;
a step covers the whole cache, and a mask, or the kernel itself, keeps to the filled part. Without a GPU the same step
runs uncaptured, for tests.

Over a block store (`PagedGraphs`) each running text has a slot. The device keeps what it needs from step to step by
slot: the text's block table, updated where it changes, and its newest token, which is chosen there, so that a step need
not wait until the host has seen the previous one's result. A step is given slots. Its rows are padded to one of a few
batch sizes, each with its own graph, by a spare slot whose rows read and write the block `nowhere`.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from weft.decode.config import Sampling
from weft.decode.engine.paging import BlockStore, PagedCache
from weft.decode.fast.cuda import CUDAFastPath, PagedFastPath, PromptChunk, supports_kernels
from weft.decode.fast.matmul import has_cuda_kernels
from weft.decode.fast.path import PlainPath, positions_change
from weft.decode.sampling import Filters, TokenFetch, check_logits, draw, greedy, on_device
from weft.errors import ModelError
from weft.models.base import LanguageModel, State
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import KeyValueCache
from weft.nn.experts import ExpertLayers

MIN_BUCKET = 256  # keys that a step of the plain model covers at least; doubled when they are filled
MAX_AHEAD = 4  # steps by which the device may be ahead of the host
MIN_TABLE_BLOCKS = 16  # blocks of a text that a step of the plain model covers at least
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a step; above, multiples of 64
StepRows = tuple[list[int], list[int], list[int]]  # slots, tokens read before, and next tokens
Captured = tuple[torch.cuda.CUDAGraph, Tensor]  # a graph, and the tensor that holds its result after a replay


class CaptureSpace:
    """Stream and memory pool of all graphs of a device: a stream has workspaces, and graphs run one after another."""

    def __init__(self, device: torch.device):
        self.device, self.stream, self.pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.warmed_up: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()  # kinds of work, by weights
        self.keeper = torch.cuda.CUDAGraph()  # an empty graph: without one the pool would be closed
        capturing = torch.cuda.graph(self.keeper, self.pool, self.stream, capture_error_mode="thread_local")
        with warnings.catch_warnings(record=True), capturing:
            pass

    def capture(
        self, model: Transformer, kind: Hashable, work: Callable[[], Tensor], *, undo: Callable[[], None]
    ) -> Captured:
        """Capture `work` as a CUDA graph, after a warm-up in which its kernels are compiled and loaded, and which is
        undone. Work of a kind that these weights have done before needs no warm-up."""
        kinds = self.warmed_up.setdefault(model.get_submodule("decoder.blocks.0.attention.out"), set())
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if kind not in kinds:
                work()
                undo()
                kinds.add(kind)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return graph, result


@cache
def capture_space(device: torch.device) -> CaptureSpace | None:
    """The device's only capture space; None if it has no CUDA graphs."""
    return CaptureSpace(device) if device.type == "cuda" else None


class BucketState(TransformerState):
    """A state as a step of fixed shape sees it: the first `size` positions, of which each row fills a part."""

    def __init__(self, state: TransformerState, size: int):
        super().__init__(
            state.cache, state.lengths.shape[0], size, source_cache=state.source_cache, source_mask=state.source_mask
        )
        self.lengths, self.longest, self.history = state.lengths, size - 1, state.history
        self.even = False  # only the device knows the lengths

    def advance(self, time: int, lengths: Tensor | None = None) -> None:
        self.lengths.add_(time)


def has_fixed_shape(model: LanguageModel, state: State) -> bool:
    """Whether all steps within the capacity of `state` have one shape, as CUDA graphs need, and run in one process."""
    if not isinstance(model, Transformer) or not isinstance(state, TransformerState) or model.shards > 1:
        return False
    fixed = isinstance(state.cache, KeyValueCache) and not _loops_over_experts(model)
    return fixed and not positions_change(model, state.max_len)


def _loops_over_experts(model: Transformer) -> bool:
    """Whether the host reads how many tokens each expert has, so that a step can't be captured."""
    return any(isinstance(part, ExpertLayers) and not part.groups_products(part.gate_up) for part in model.modules())


class GraphStep(PlainPath):
    """Decode steps of a state as CUDA graphs, by the CUDA fast path's kernels if they fit, else by the model.

    With a `sampler` a step ends by choosing the tokens that the next one reads. A row at its capacity stays at the last
    position. After the state is reordered or truncated a new GraphStep is needed: graphs hold addresses.
    """

    def __init__(
        self,
        model: Transformer,
        state: TransformerState,
        sampler: "DeviceSampler | None" = None,
        *,
        min_bucket: int = MIN_BUCKET,
    ):
        super().__init__(model, state)
        self.sampler, self.min_bucket = sampler, min_bucket
        self.kernels = CUDAFastPath(model, state) if CUDAFastPath.fits(model, state) else None
        self.device = state.lengths.device
        self.space = capture_space(self.device)
        state.lengths = state.lengths.clone()  # a private copy, which graphs increment in place
        self.tokens = torch.zeros(len(state.lengths), 1, dtype=torch.long, device=self.device)  # read by the next step
        self.graphs: dict[int, Captured] = {}

    @classmethod
    def fits(cls, model: LanguageModel, state: State) -> bool:
        return state.lengths.is_cuda and has_fixed_shape(model, state)

    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Read tokens (batch,), or what the last step chose → logits (batch, vocab_size), valid until the next step."""
        if tokens is not None:
            self.tokens.copy_(tokens.unsqueeze(1))
        size = self.state.max_len  # positions that this step covers; the kernels read only the filled ones
        if self.kernels is None:
            size = min(size, max(self.min_bucket, 1 << self.state.longest.bit_length()))
        if self.space is None:
            logits = self._work(size)
        else:
            if size not in self.graphs:
                self.graphs[size] = self._capture(self.space, size)
            graph, logits = self.graphs[size]
            graph.replay()
        self.state.longest = min(self.state.longest + 1, self.state.max_len)
        return logits

    def run_ahead(self, logits: Tensor, steps: int) -> Iterator[list[int]]:
        """Yield the tokens of all rows, step by step, at most `steps` times, from the logits (batch, V) after the
        prompts on. The device works up to MAX_AHEAD steps ahead, which a caller that stops early has wasted."""
        sampler = self.sampler
        assert sampler is not None
        self.tokens.copy_(sampler(logits).unsqueeze(1))
        pending: deque[TokenFetch] = deque()
        for number in range(steps):
            if number:
                sampler.current_step = number
                logits = self()
            pending.append(TokenFetch(sampler.history[number]))
            if len(pending) > (MAX_AHEAD if self.device.type == "cuda" else 0):
                yield _checked(pending.popleft()(), logits, sampler.vocab_size)
        while pending:
            yield _checked(pending.popleft()(), logits, sampler.vocab_size)

    def _work(self, size: int) -> Tensor:
        self.state.lengths.clamp_(max=self.state.max_len - 1)
        if self.kernels is not None:
            logits = self.kernels.step(self.tokens)
        else:
            logits = self.model.step(self.tokens, BucketState(self.state, size))[:, -1]
        if self.sampler is not None:
            self.tokens.copy_(self.sampler(logits).unsqueeze(1))
        return logits

    def _capture(self, space: CaptureSpace, size: int) -> Captured:
        """Capture the work, and restore tokens and lengths."""
        tokens, lengths = self.tokens.clone(), self.state.lengths.clone()

        def undo() -> None:
            self.tokens.copy_(tokens)
            self.state.lengths.copy_(lengths)
            if self.sampler is not None:
                self.sampler.step.fill_(self.sampler.current_step)

        kind = len(self.tokens), 0 if self.kernels else size, None if self.sampler is None else self.sampler.kind
        captured = space.capture(self.model, kind, partial(self._work, size), undo=undo)
        undo()
        return captured


class DeviceSampler:
    """Chooses and records each row's next token on the device, like `choose_tokens`; numbers are drawn beforehand."""

    def __init__(
        self,
        settings: Sequence[Sampling],
        rngs: Sequence[torch.Generator],
        steps: int,
        *,
        vocab_size: int,
        device: torch.device,
    ):
        self.vocab_size = vocab_size
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.current_step = 0  # the host's copy of `step`, which a warm-up is reset to
        self.history = torch.zeros(steps, len(settings), dtype=torch.long, device=device)  # chosen tokens
        sampled = [not row.greedy for row in settings]
        self.any_sampled, self.all_sampled = any(sampled), all(sampled)
        if self.any_sampled:
            self.sampled = on_device(torch.tensor(sampled), device)
            uniforms = torch.zeros(steps, len(settings), dtype=torch.float64)
            for row, rng in enumerate(rngs):
                if sampled[row]:
                    uniforms[:, row] = torch.rand(steps, dtype=torch.float64, generator=rng)
            self.uniforms = on_device(uniforms, device)
        self.filters = Filters(settings, vocab_size, device)
        self.kind = self.any_sampled, self.all_sampled, *self.filters.kind
        self.uses_kernel = device.type == "cuda" and not self.any_sampled and has_cuda_kernels()

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the next tokens (batch,) after logits (batch, ≥ vocab_size); −1 is recorded where none is possible."""
        if self.uses_kernel:
            from weft.decode.fast import kernels

            tokens = kernels.argmax_tokens(logits, self.vocab_size, self.step, self.history)
            self.step.add_(1)
            return tokens
        logits = logits[:, : self.vocab_size].float()
        best = greedy(logits)
        tokens = best
        if self.any_sampled:
            tokens = draw(self.filters(logits), self.uniforms.index_select(0, self.step)[0])
            tokens = tokens if self.all_sampled else torch.where(self.sampled, tokens, best)
        finite = logits.amax(dim=-1).isfinite()
        self.history.index_copy_(0, self.step, torch.where(finite, tokens, -1).unsqueeze(0))
        self.step.add_(1)
        return torch.where(finite, tokens, 0)


def _checked(tokens: list[int], logits: Tensor, vocab_size: int) -> list[int]:
    if min(tokens) < 0:
        check_logits(logits[:, :vocab_size])
        raise ModelError("the model gave NaN or infinite logits on the way; its weights are damaged")
    return tokens


def paged_graphs(model: Transformer, store: BlockStore, slots: int) -> "PagedGraphs | None":
    """Build CUDA graphs over a block store, or None if model or device don't allow them."""
    max_len = store.blocks * store.block_size
    allowed = model.embedding.weight.is_cuda and model.encoder is None and model.ngrams is None
    # with n-grams, a slot's newest token is not enough
    if not allowed or _loops_over_experts(model) or positions_change(model, max_len):
        return None
    return PagedGraphs(model, store, slots, kernels=supports_kernels(model))


class PagedGraphs:
    """Decode steps over a block store, for texts in `slots` slots."""

    def __init__(self, model: Transformer, store: BlockStore, slots: int, *, kernels: bool):
        device = store.data.device
        self.model, self.store, self.device, self.spare_slot = model, store, device, slots
        self.space = capture_space(device)
        self.tables = torch.full((slots + 1, store.blocks), store.nowhere, dtype=torch.int32, device=device)
        self.newest = torch.zeros(slots + 1, dtype=torch.long, device=device)
        self.kernels = PagedFastPath(model, store, self.tables) if kernels else None
        self.steps: dict[tuple[int, int], PagedStep] = {}  # by batch size and table width
        # Prefill is bound by compute and decode steps by memory, so they take less time side by side.
        self.prefill_stream = torch.cuda.Stream(device) if kernels else None

    def update_tables(self, changes: dict[tuple[int, int], int]) -> None:
        """Set block n of the text in slot s to changes[s, n]."""
        columns = np.concatenate([np.array(list(changes)).T, np.array(list(changes.values()))[None]])
        slots, positions, blocks = on_device(torch.from_numpy(columns), self.device).unbind(0)
        self.tables[slots, positions] = blocks.int()

    def set_newest(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Set the newest tokens (slots,) of the texts in these slots, which their next steps read."""
        self.newest.index_copy_(0, on_device(torch.tensor(slots), self.device), tokens)

    def step_and_prefill(self, rows: StepRows, chunks: list[PromptChunk]) -> Tensor:
        """Run a step of `rows` and, in parallel, prefill chunks, by the kernels → features (rows + chunks, d_model)."""
        assert self.kernels is not None and chunks
        if self.prefill_stream is None:
            return torch.cat([*([self.step(*rows)] if rows[0] else []), self.kernels.read(chunks)])
        current = torch.cuda.current_stream(self.device)
        self.prefill_stream.wait_stream(current)
        features = [self.step(*rows)] if rows[0] else []
        with torch.cuda.stream(self.prefill_stream):
            prefilled = self.kernels.read(chunks)
        prefilled.record_stream(current)
        current.wait_stream(self.prefill_stream)
        return torch.cat([*features, prefilled])

    def capture_steps(self) -> None:
        """Capture the step of every batch size before it is needed; the spare slot's rows write nowhere."""
        slots = self.spare_slot  # as many as there are rows
        for rows in [*(size for size in BATCH_SIZES if size < slots), *range(320, slots, 64), slots]:
            self.step([self.spare_slot] * rows, [0] * rows, [0] * rows)

    def step(self, slots: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Read one token in each of these slots, after lengths[i] others; −1 stands for the newest one on the device →
        features (slots, d_model), valid until the next step."""
        rows = len(slots)
        size = next((size for size in BATCH_SIZES if size >= rows), -(-rows // 64) * 64)
        width = 0  # the kernels read only the filled blocks
        if self.kernels is None:
            blocks = max(MIN_TABLE_BLOCKS, max(lengths) // self.store.block_size + 1)
            width = 1 << (blocks - 1).bit_length()  # the next power of two
        key = size, min(width, self.store.blocks)
        if key not in self.steps:
            self.steps[key] = PagedStep(self, *key)
        step = self.steps[key]
        inputs = np.zeros((3, size), dtype=np.int64)
        inputs[0, rows:] = self.spare_slot
        inputs[:, :rows] = slots, lengths, tokens
        step.inputs.copy_(on_device(torch.from_numpy(inputs), self.device), non_blocking=True)
        if self.space is None:
            return step.work()[:rows]
        if step.captured is None:
            kind = "paged", *key, self.store.blocks, self.store.block_size
            step.captured = self.space.capture(self.model, kind, step.work, undo=lambda: None)
        graph, features = step.captured
        graph.replay()
        return features[:rows]


class PagedStep:
    """A step of `rows` rows; with the plain model, of texts of up to `width` blocks."""

    def __init__(self, graphs: PagedGraphs, rows: int, width: int):
        self.graphs, self.width = graphs, width
        self.inputs = torch.zeros(3, rows, dtype=torch.long, device=graphs.device)  # slots, lengths, tokens
        self.attention: Any = None if graphs.kernels is None else graphs.kernels.step_attention(rows)
        self.captured: Captured | None = None

    def work(self) -> Tensor:
        """Read the tokens in `inputs`. Idempotent: a repeated call writes the same values to the same memory."""
        graphs, (slots, lengths, tokens) = self.graphs, self.inputs
        tokens = torch.where(tokens < 0, graphs.newest[slots], tokens)
        if graphs.kernels is not None:
            return graphs.kernels.step(tokens, lengths, slots, attention=self.attention)
        cache = PagedCache(graphs.store, graphs.tables[slots, : self.width].long())
        state = TransformerState(cache, len(slots), self.width * graphs.store.block_size)  # type: ignore[arg-type]
        state.lengths, state.longest = lengths, state.max_len - 1
        state.even = False  # only the device knows the lengths
        return graphs.model.advance(tokens.unsqueeze(1), state)[:, -1]
