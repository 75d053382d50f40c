"""How a model reads on: plainly, or by a fast path that fits model, state and device. All of that is chosen here.

- native path (`native_step`): a decoder's step for one row, or for the engine's texts, and the reading of prompts, in
  one call, on a CPU, where a C compiler was found;
- CPU fast path (`cpu`): the step of common decoders in few operations, for rows of equal length, in float32;
- CUDA fast path (`cuda`): LLaMA's step, and the reading of its prompts, in a few kernels, in 16 bits;
- CUDA graphs (`cuda_graphs`): any Transformer's step, captured once and replayed.

Everything else is read by the model's own `advance`, and so is a model that several processes hold in parts: the fast
paths read whole matrices. All ways give the same logits but for rounding.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.config import Config
from weft.decode.engine.paging import BlockStore
from weft.decode.fast import native
from weft.decode.fast.cpu import ADDED, BIASED, CPUFastPath
from weft.decode.fast.cuda import CUDAFastPath
from weft.decode.fast.cuda_graphs import DeviceSampler, GraphStep, PagedGraphs
from weft.decode.fast.native_step import NativeRows, NativeStep, reading_pays, weights_are_native
from weft.decode.fast.products import has_kernels
from weft.models.base import EncoderInput, LanguageModel, State, device_of
from weft.models.config import Decoder, EncoderDecoder, LMHead
from weft.models.ngram import Recent
from weft.models.recurrent import HiddenStates
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import KeyValueCache
from weft.nn.config import Gated, RMSNorm
from weft.nn.position_config import Learned, LinearScaling, Llama3Scaling, NoPosition, Rotary, Sinusoidal
from weft.nn.scaled_dot_product import Probabilities

FIRST_CAPACITY = 1 << 10  # tokens after the prompt that a state has capacity for at the start
FIRST_CAPACITY_ON_CUDA = 1 << 15  # where CUDA graphs are captured with the address of the memory they use

Step = Callable[[Tensor], Tensor]  # the next tokens (batch,) → logits (batch, V)


class Stepper:
    """A model and what it has read, one row a sequence.

    `first` tokens are read first, and no row grows beyond `limit`; capacity grows with the texts.
    """

    def __init__(self, model: LanguageModel, batch: int, first: int, limit: int, source: EncoderInput | None = None):
        self.model, self.limit = model, limit
        # an answer is about as long as its source: most have ended before the others' capacity is moved
        more = FIRST_CAPACITY if source is None else source.tokens.shape[1] + 1
        capacity = min(limit, first + (FIRST_CAPACITY_ON_CUDA if device_of(model).type == "cuda" else more))
        self.state = model.start(batch, capacity, source)
        whole = isinstance(self.state, TransformerState) and not isinstance(self.state.cache, KeyValueCache)
        if whole or not isinstance(self.state, TransformerState | HiddenStates | Recent):  # such a state can't grow
            self.state = model.start(batch, limit, source) if capacity < limit else self.state
        self._step: Step | None = None

    def read(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time), of row i the first lengths[i] → features (batch, time, …) for the head."""
        moved, step = grow(self.state, tokens.shape[1], self.limit), self._step
        self._step = None
        if native_reads(self.model, self.state, tokens.numel()):
            native = step if isinstance(step, NativeStep) and not moved else NativeStep(self.model, self.state)  # type: ignore[arg-type]
            if native_path_fits(self.model, self.state):
                self._step = native
            return native.read(tokens, lengths)
        kernels = cuda_fast_path(self.model, self.state) if not self.state.longest else None
        if kernels is None:
            return self.model.advance(tokens, self.state, lengths)
        self.state.reserve(tokens.shape[1])
        features = kernels.read(tokens)
        self.state.advance(tokens.shape[1], lengths)
        return features

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token in every row, (batch,), by the fastest way → logits (batch, V), good until the next step."""
        if grow(self.state, 1, self.limit):
            self._moved()
        if self._step is None:
            self._step = _fastest(self.model, self.state, self.limit)
        return self._step(tokens)

    def step_between(self, tokens: Tensor) -> Tensor:
        """The same where rows change after every token: too often for a CUDA graph to be captured."""
        if self.state.lengths.is_cuda:
            return self.model.head(self.read(tokens.unsqueeze(1)))[:, -1]
        return self.step(tokens)

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] has read; the batch may grow or shrink."""
        if not index.is_cuda and index.tolist() == list(range(len(self.state.lengths))):
            return
        self.state.reorder(index)
        self._moved()

    def _moved(self) -> None:
        """The state's memory is elsewhere, which only the CPU fast path notices; for one row another may be faster."""
        if not isinstance(self._step, CPUFastPath) or native_path_fits(self.model, self.state):
            self._step = None

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row."""
        if self.state.longest > length:
            self.state.truncate(length)
            if isinstance(self._step, NativeStep):
                self._step.last = None
            else:
                self._step = None

    @property
    def runs_ahead(self) -> bool:
        """Whether tokens can be chosen on the device, so that it needn't wait for the host between two steps."""
        state = self.state
        return state.lengths.is_cuda and state.max_len == self.limit and shape_is_fixed(self.model, state, self.limit)

    def run_ahead(self, logits: Tensor, sampler: DeviceSampler, steps: int) -> Iterator[list[int]]:
        """The tokens of all rows, step by step, from the logits (batch, V) after the prompts on; `steps` at most."""
        model, state = self.model, self.state
        assert isinstance(model, Transformer) and isinstance(state, TransformerState)
        return GraphStep(model, state, cuda_fast_path(model, state), sampler).run_ahead(logits, steps)


def grow(state: State, tokens: int, limit: int) -> bool:
    """Raise the capacity of `state` by half if `tokens` more don't fit, up to `limit`; return whether memory moved."""
    needed = state.longest + tokens
    if needed <= state.max_len or needed > limit:
        return False
    return state.grow(min(limit, max(needed, state.max_len * 3 // 2)))


def _fastest(model: LanguageModel, state: State, limit: int) -> Step:
    if isinstance(model, Transformer) and isinstance(state, TransformerState):
        if state.lengths.is_cuda and shape_is_fixed(model, state, limit):
            return GraphStep(model, state, cuda_fast_path(model, state))
        if native_path_fits(model, state):
            return NativeStep(model, state)
        if cpu_fast_path_fits(model, state):
            return CPUFastPath(model, state)
    return lambda tokens: model.step(tokens.unsqueeze(1), state)[:, -1]


def paged_graphs(model: Transformer, store: BlockStore, slots: int) -> PagedGraphs | None:
    """Steps over the blocks of a pool as CUDA graphs, where model and device allow them; None: read plainly."""
    longest = store.blocks * store.block_size
    if not model.embedding.weight.is_cuda or model.encoder is not None or stretches(model, longest):
        return None
    if model.ngrams is not None:  # a slot knows its newest token, and not those before it
        return None
    return PagedGraphs(model, store, slots, kernels=_kernels_fit(model))


def _names(*names: str, **below: str) -> frozenset[str]:
    return frozenset(names) | {f"{name}.{each}" for name, several in below.items() for each in several.split()}


# the settings that each reads, with all that stands below them; dropout and initial weights don't matter in a step
LLAMA = _names(
    *("vocab_size", "context", "layers", "d_model", "embedding_scale", "dropout", "init"),
    attention="heads kv_heads d_head scale dropout",
    feedforward="d_ff dropout",
    norm="eps",
    position="base scaling",
    head="tied bias scale",
)
NATIVE = LLAMA | _names("ngrams", attention="bias", feedforward="activation bias", norm="bias offset")
CPU = LLAMA | _names(
    *("feedforward", "norm", "head", "placement", "embedding_norm", "ngrams", "encoder_layers", "source_vocab_size"),
    attention="bias qk_norm window",
)


def llama_like(settings: Any) -> bool:
    """Whether a model is LLaMA with other sizes."""
    if not isinstance(settings, Decoder) or not isinstance(settings.position, Rotary):
        return False
    if not (isinstance(settings.feedforward, Gated) and isinstance(settings.norm, RMSNorm)):
        return False
    return settings.position.changes_after(settings.context) is None and _others_at_default(settings, LLAMA)


def _others_at_default(settings: Decoder | EncoderDecoder, read: Collection[str]) -> bool:
    """Whether a model writes words, and all settings but those that are `read` are at their defaults. Other positions
    than rotary ones are read whole, from the model's own tables."""
    read = read if isinstance(settings.position, Rotary) else {*read, "position"}
    read_below = tuple(f"{name}." for name in read)
    return isinstance(settings.head, LMHead) and all(f"{name}.".startswith(read_below) for name in _changed(settings))


def _changed(settings: Config) -> set[str]:
    names: set[str] = set()
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            below = {f"{name}.{each}" for each in _changed(value)} if isinstance(value, Config) else set()
            names |= below or (set() if isinstance(value, Config) and field.is_required() else {name})
    return names


def native_path_fits(model: LanguageModel, state: State) -> bool:
    """Whether step.c reads on from a state token by token: it has one row."""
    return len(state.lengths) == 1 and state.even and native_reads(model, state, 1)


def native_reads(model: LanguageModel, state: State, tokens: int) -> bool:
    """Whether it is fastest at reading so many tokens in all after the rows of a state."""
    cached = isinstance(state, TransformerState) and isinstance(state.cache, KeyValueCache)
    return cached and _is_native(model) and reading_pays(model, tokens)  # type: ignore[arg-type]


def native_rows(model: Transformer, store: BlockStore) -> NativeRows | None:
    """Steps of texts in the blocks of a pool in one call each, where step.c can do that."""
    if model.embedding.weight.device.type != "cpu" or store.scales is not None or not _is_native(model):
        return None
    return NativeRows(model, store.data[:, :, 0], store.data[:, :, 1])


def _is_native(model: LanguageModel) -> bool:
    """step.c is written for the shape of LLaMA or of GPT-2, in float32."""
    settings: Any = model.config
    if not _in_float32(model) or not isinstance(settings, Decoder):
        return False
    placed = isinstance(settings.position, Rotary | Learned | Sinusoidal | NoPosition)
    scaled = isinstance(getattr(settings.position, "scaling", None), LinearScaling | Llama3Scaling | None)
    if not placed or not scaled or settings.d_head > native.MAX_D_HEAD:
        return False
    if settings.feedforward.activation not in native.ACTIVATIONS or not _others_at_default(settings, NATIVE):
        return False
    return native.library() is not None and weights_are_native(model)  # type: ignore[arg-type]


def cpu_fast_path_fits(model: LanguageModel, state: State) -> bool:
    """A decoder whose positions do the same in every step, with or without a source, in float32, rows equally long."""
    settings: Any = model.config
    even = isinstance(state, TransformerState) and state.even and isinstance(state.cache, KeyValueCache)
    if not even or not _in_float32(model) or not isinstance(settings, Decoder | EncoderDecoder):
        return False
    known = type(settings.position) in (Rotary, NoPosition, *ADDED, *BIASED)
    if settings.placement not in ("pre", "post", "none") or not known:
        return False
    return settings.position.changes_after(settings.context) is None and _others_at_default(settings, CPU)


def _in_float32(model: LanguageModel) -> bool:
    """Whether a Transformer is read on a CPU in float32, by whatever reads it fastest."""
    if not isinstance(model, Transformer) or model.training:
        return False
    table = model.embedding.weight
    if table.device.type != "cpu" or table.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return _readable(model)


def cuda_fast_path(model: LanguageModel, state: State) -> CUDAFastPath | None:
    """The kernels for this model and state, where they fit: LLaMA's shape, on a GPU, in 16 bits."""
    if not isinstance(model, Transformer) or not isinstance(state, TransformerState):
        return None
    fits = isinstance(state.cache, KeyValueCache) and _kernels_fit(model)
    return CUDAFastPath(model, state) if fits else None


def _kernels_fit(model: Transformer) -> bool:
    table = model.embedding.weight
    if not table.is_cuda or table.dtype not in (torch.bfloat16, torch.float16) or not has_kernels():
        return False
    return llama_like(model.config) and model.config.d_head in (32, 64, 128, 256) and _readable(model)


def _readable(model: Transformer) -> bool:
    """Whether a fast path can read the weights by itself: they are all here, and nobody looks inside the model, whose
    modules only the plain way calls."""
    return model.shards == 1 and not any(
        part.watchers if isinstance(part, Probabilities) else part._forward_hooks or part._forward_pre_hooks
        for part in model.modules()
    )


def shape_is_fixed(model: LanguageModel, state: State, limit: int) -> bool:
    """Whether all steps after `state`, up to `limit` tokens, are of one shape, as a CUDA graph must be, and need no
    other process."""
    if not (isinstance(model, Transformer) and isinstance(state, TransformerState)) or model.shards > 1:
        return False
    return isinstance(state.cache, KeyValueCache) and not stretches(model, limit)


def stretches(model: Transformer, longest: int) -> bool:
    """Whether the positions of a text change as it grows to `longest` tokens: no two steps are the same then."""
    context = model.config.context
    lengths = [kind.position.changes_after(context) for kind in model.config.kinds() if kind.position is not None]
    return any(length is not None and longest > length for length in lengths)
