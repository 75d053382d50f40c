"""Choice of the fastest path that advances a model, for its state and device. Paths agree up to rounding.

- CUDA graphs (`cuda_graphs`): any Transformer's decode step, captured once and replayed, with the CUDA fast path's
  kernels where they fit;
- native path (`native_step`): one row's decode step, and prefill, in one C call on a CPU;
- CPU fast path (`cpu`): common decoders' steps in few torch operations, for rows of equal length, in float32;
- CUDA fast path (`cuda`): prefill of LLaMA's shape in a few kernels, in 16 bits;
- the model's own `advance`, which also runs models sharded over several processes: fast paths read whole matrices.
"""

from collections.abc import Iterator

from torch import Tensor

from weft.decode.fast.cpu import CPUFastPath
from weft.decode.fast.cuda import CUDAFastPath
from weft.decode.fast.cuda_graphs import DeviceSampler, GraphStep
from weft.decode.fast.native_step import NativeStep
from weft.decode.fast.path import PlainPath
from weft.models.base import EncoderInput, LanguageModel, State, device_of
from weft.models.transformer import Transformer, TransformerState

FIRST_CAPACITY = 1 << 10  # tokens after the prompt that a state has capacity for at the start
FIRST_CAPACITY_ON_CUDA = 1 << 15  # larger on a GPU: captured graphs hold addresses, and growing moves the memory

# The first path that fits is used.
STEP_PATHS: tuple[type[PlainPath], ...] = (GraphStep, NativeStep, CPUFastPath, PlainPath)
PREFILL_PATHS: tuple[type[PlainPath], ...] = (NativeStep, CUDAFastPath, PlainPath)


class Stepper:
    """A model and its decoding state, one row per sequence, with capacity for `prompt_tokens` that grows to `limit`."""

    def __init__(
        self, model: LanguageModel, batch: int, prompt_tokens: int, *, limit: int, source: EncoderInput | None = None
    ):
        self.model, self.limit = model, limit
        # A text is about as long as its source, so most end before the capacity has to grow.
        spare = FIRST_CAPACITY if source is None else source.tokens.shape[1] + 1
        capacity = min(limit, prompt_tokens + (FIRST_CAPACITY_ON_CUDA if device_of(model).type == "cuda" else spare))
        self.state = model.start(batch, capacity, source)
        if not self.state.can_grow and capacity < limit:
            self.state = model.start(batch, limit, source)
        self._path: PlainPath | None = None  # the last path used
        self._is_fastest = False  # whether it is the one for decode steps

    def read(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Read tokens (batch, time), the first lengths[i] of row i → features (batch, time, …) for the head."""
        if grow(self.state, tokens.shape[1], self.limit):
            self._memory_moved()
        count = tokens.numel()
        self._is_fastest = False
        path = self._use(next(path for path in PREFILL_PATHS if path.fits_prefill(self.model, self.state, count)))
        return path.read(tokens, lengths)

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token in every row, (batch,) → logits (batch, V), valid until the next step."""
        if grow(self.state, 1, self.limit):
            self._memory_moved()
        if self._path is None or not self._is_fastest:
            self._path = self._use(next(path for path in STEP_PATHS if path.fits(self.model, self.state)))
            self._is_fastest = True
        return self._path(tokens)

    def step_between(self, tokens: Tensor) -> Tensor:
        """Read one token in every row without CUDA graphs: capturing doesn't pay if rows are reordered each step."""
        if self.state.lengths.is_cuda:
            return self.model.head(self.read(tokens.unsqueeze(1)))[:, -1]
        return self.step(tokens)

    def reorder(self, index: Tensor) -> None:
        """Make row i continue from row index[i]; the batch may grow or shrink."""
        if not index.is_cuda and index.tolist() == list(range(len(self.state.lengths))):
            return
        self.state.reorder(index)
        self._memory_moved()

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every row."""
        if self.state.longest > length:
            self.state.truncate(length)
            if self._path is not None and not self._path.survives_truncation:
                self._drop_path()

    @property
    def runs_ahead(self) -> bool:
        """Whether tokens can be chosen on the device, so that it needn't wait for the host between steps."""
        return self.state.max_len == self.limit and GraphStep.fits(self.model, self.state)

    def run_ahead(self, logits: Tensor, sampler: DeviceSampler, steps: int) -> Iterator[list[int]]:
        """Yield all rows' tokens, step by step, at most `steps` times, from the prompts' last logits (batch, V) on."""
        assert isinstance(self.model, Transformer) and isinstance(self.state, TransformerState)
        self._drop_path()
        return GraphStep(self.model, self.state, sampler).run_ahead(logits, steps)

    def _use(self, path: type[PlainPath]) -> PlainPath:
        """Return the current path if it is of this type, else a new one."""
        if self._path is None or type(self._path) is not path:
            self._path = path(self.model, self.state)
        return self._path

    def _memory_moved(self) -> None:
        if self._path is not None and not self._path.survives_move:
            self._drop_path()
        elif len(self.state.lengths) == 1:  # a single row may have a faster path
            self._is_fastest = False

    def _drop_path(self) -> None:
        self._path, self._is_fastest = None, False


def grow(state: State, tokens: int, limit: int) -> bool:
    """Raise the capacity of `state` by half if `tokens` more don't fit, up to `limit`; return whether memory moved."""
    needed = state.longest + tokens
    if needed <= state.max_len or needed > limit:
        return False
    return state.grow(min(limit, max(needed, state.max_len * 3 // 2)))
