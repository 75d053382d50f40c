"""Decoding steps of fixed shape: the same kernels on the same memory for every token.

Such a step can be recorded once and replayed (a CUDA graph), which costs the host one call instead of hundreds, and
the next token can be chosen on the device, so that nobody waits for anybody. Lengths are counted on the device; the
whole cache is there, and a mask, or the kernel itself, keeps to the part that is filled. Without a GPU the same step
runs unrecorded, for tests.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.decode.config import Sampling
from weft.decode.fast import cuda as fused
from weft.decode.sampling import check_logits, draw, greedy, min_p, top_k, top_p, typical
from weft.errors import ModelError
from weft.models.base import LanguageModel, State
from weft.models.transformer import Transformer, TransformerState
from weft.nn.cache import KeyValueCache
from weft.nn.config import DynamicNTK, Rotary

FIRST_BUCKET = 256  # keys that a step looks at, at least; twice as many when these are filled
AHEAD = 4  # steps that the device may be in front of the host

Choose = Callable[[Tensor], Tensor]


def can_be_fixed(model: LanguageModel, state: State) -> bool:
    """Whether steps of `model` after `state` can be of fixed shape."""
    if not (isinstance(model, Transformer) and isinstance(state, TransformerState)):
        return False
    return isinstance(state.cache, KeyValueCache) and not stretches(model, state.max_len)


def stretches(model: Transformer, longest: int) -> bool:
    """Whether the positions of a text change as it grows to `longest` tokens: no two steps are the same then."""
    position = model.config.position
    dynamic = isinstance(position, Rotary) and isinstance(position.scaling, DynamicNTK)
    return dynamic and longest > model.config.context


class _Bucket(TransformerState):
    """A state as one step of fixed shape sees it: the first `seen` places, of which each row fills its own part."""

    def __init__(self, state: TransformerState, seen: int):
        super().__init__(state.cache, state.lengths.shape[0], seen, state.source_cache, state.source_mask)
        self.lengths = state.lengths
        self.even = False  # lengths are known to the device alone
        self.longest = seen - 1

    def advance(self, time: int, lengths: Tensor | None = None) -> None:
        self.lengths.add_(time)


class _Studio:
    """Where steps of one device are recorded: a stream and a pool of memory, the same for all.

    Each stream has libraries' workspaces of its own, so a new one every time would cost memory. Recordings may share
    their memory, because they run one after another, and what one gives out is kept from the others.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.keeper = torch.cuda.CUDAGraph()  # an empty recording: without any the pool would be closed
        recording = torch.cuda.graph(self.keeper, self.pool, self.stream, capture_error_mode="thread_local")
        with warnings.catch_warnings(record=True), recording:
            pass


@cache
def _studio(device: torch.device) -> _Studio:
    return _Studio(device)


_rehearsals: "WeakKeyDictionary[nn.Module, set[Any]]" = WeakKeyDictionary()  # kinds of steps that weights have done


def recording(
    model: Transformer, device: torch.device, kind: Any, work: Callable[[], Tensor], take_back: Callable[[], None]
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Do the work once, so that everything is compiled and loaded, take it back, and record it; and where the result
    will be. Work of a kind that was rehearsed before, with these weights, is recorded at once.
    """
    assert model.decoder is not None
    weights = model.decoder.blocks[0].attention.qkv  # type: ignore[union-attr]
    assert isinstance(weights, nn.Module)
    known = _rehearsals.setdefault(weights, set())
    studio, now = _studio(device), torch.cuda.current_stream(device)
    studio.stream.wait_stream(now)
    with torch.cuda.stream(studio.stream):
        if kind not in known:
            work()
            take_back()
            known.add(kind)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=studio.pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    now.wait_stream(studio.stream)
    return graph, result


class FixedStep:
    """One more token in every row of a state, over and over.

    `tokens` (batch, 1) is what is read next. With `choose`, from logits (batch, vocab_size) to tokens (batch,), the
    step ends by putting its choice there. A row that has filled its room stays in the last place: what it gives then
    means nothing. The state is kept up to date; after `state.reorder` a new FixedStep is needed.
    """

    def __init__(
        self, model: Transformer, state: TransformerState, choose: Choose | None = None, record: bool | None = None
    ):
        self.model, self.state, self.choose = model, state, choose
        self.device = state.lengths.device
        state.lengths = state.lengths.clone()  # our own, to be counted up in place
        self.tokens = torch.zeros(len(state.lengths), 1, dtype=torch.long, device=self.device)
        self.record = self.device.type == "cuda" if record is None else record
        self.fused = fused.Fused(model, state) if fused.fits(model, state) else None
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, tokens: Tensor | None = None) -> Tensor:
        """Read tokens (batch,), or what the last step chose; logits (batch, vocab_size), overwritten by the next."""
        if tokens is not None:
            self.tokens.copy_(tokens.unsqueeze(1))
        seen = self._seen()
        if not self.record:
            logits = self._work(seen)
        else:
            if seen not in self.recorded:
                self.recorded[seen] = self._recording(seen)
            graph, logits = self.recorded[seen]
            graph.replay()
        self.state.longest = min(self.state.longest + 1, self.state.max_len)
        return logits

    def _seen(self) -> int:
        """Places that this step has to look at; the kernels of `fused` look at the filled ones only."""
        room = self.state.max_len
        if self.fused is not None:
            return room
        seen = FIRST_BUCKET
        while seen <= self.state.longest:
            seen *= 2
        return min(seen, room)

    def _work(self, seen: int) -> Tensor:
        self.state.lengths.clamp_(max=self.state.max_len - 1)
        if self.fused is not None:
            logits = self.fused.step(self.tokens)
        else:
            logits = self.model.step(self.tokens, _Bucket(self.state, seen))[:, -1]
        if self.choose is not None:
            self.tokens.copy_(self.choose(logits).unsqueeze(1))
        return logits

    def _recording(self, seen: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The work, recorded, with tokens and lengths as they were before."""
        kept = self.tokens.clone(), self.state.lengths.clone()
        kind = len(self.tokens), 0 if self.fused else seen, getattr(self.choose, "kind", None)
        found = recording(self.model, self.device, kind, lambda: self._work(seen), lambda: self._take_back(*kept))
        self._take_back(*kept)
        return found

    def _take_back(self, tokens: Tensor, lengths: Tensor) -> None:
        self.tokens.copy_(tokens)
        self.state.lengths.copy_(lengths)
        if isinstance(self.choose, Chooser):
            self.choose.restart()


class Chooser:
    """Chooses the next token of each row on the device, as `sampling.choose` does, and writes it down.

    What a row draws follows from its generator alone: its numbers for all `steps` are drawn beforehand.
    """

    def __init__(
        self,
        settings: Sequence[Sampling],
        generators: Sequence[torch.Generator],
        steps: int,
        vocab_size: int,
        device: torch.device,
    ):
        self.vocab_size = vocab_size
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.begun = 0  # what `restart` goes back to
        self.written = torch.zeros(steps, len(settings), dtype=torch.long, device=device)
        drawn = [not each.greedy for each in settings]
        self.any, self.all = any(drawn), all(drawn)
        if self.any:
            self.drawn = _sent(torch.tensor(drawn), device)
            columns = [
                torch.rand(steps, dtype=torch.float64, generator=generator)
                if wanted
                else torch.zeros(steps, dtype=torch.float64)
                for wanted, generator in zip(drawn, generators, strict=True)
            ]
            self.uniforms = _sent(torch.stack(columns, dim=1), device)

        def amounts(values: list[float], neutral: float) -> Tensor | None:
            """On the device, where any row asks for something."""
            return _sent(torch.tensor(values), device) if any(value != neutral for value in values) else None

        self.degrees = amounts([1.0 if each.greedy else each.temperature for each in settings], 1.0)
        self.k: Tensor | int | None = None
        ks = [min(each.top_k or vocab_size, vocab_size) for each in settings]
        if min(ks) < vocab_size:
            self.k = ks[0] if len(set(ks)) == 1 else _sent(torch.tensor(ks), device)
        self.p = amounts([1.0 if each.top_p is None else each.top_p for each in settings], 1.0)
        self.least = amounts([0.0 if each.min_p is None else each.min_p for each in settings], 0.0)
        self.typical = amounts([1.0 if each.typical_p is None else each.typical_p for each in settings], 1.0)
        asked = self.degrees, self.k, self.p, self.least, self.typical
        self.kind = self.any, self.all, *(type(each) for each in asked)  # choosers of a kind run the same kernels
        self.by_kernel = device.type == "cuda" and not self.any and fused.has_kernels()

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
            tokens = draw(self._filtered(logits), self.uniforms.index_select(0, self.count)[0])
            tokens = tokens if self.all else torch.where(self.drawn, tokens, best)
        fine = logits.amax(dim=-1).isfinite()
        self.written.index_copy_(0, self.count, torch.where(fine, tokens, -1).unsqueeze(0))
        self.count.add_(1)
        return torch.where(fine, tokens, 0)

    def _filtered(self, logits: Tensor) -> Tensor:
        """As `sampling.filtered`, with numbers that are on the device already."""
        if self.degrees is not None:
            logits = logits / self.degrees.unsqueeze(-1)
        if self.k is not None:
            logits = top_k(logits, self.k)
        for keep, amount in ((top_p, self.p), (min_p, self.least), (typical, self.typical)):
            if amount is not None:
                logits = keep(logits, amount)
        return logits

    def restart(self) -> None:
        """Forget what was written since the recording began: it was a rehearsal."""
        self.count.fill_(self.begun)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to the device; nobody waits until it is there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def run_ahead(
    model: Transformer,
    state: TransformerState,
    logits: Tensor,
    chooser: Chooser,
    steps: int,
    record: bool | None = None,
) -> Iterator[list[int]]:
    """The tokens of all rows, step by step, from the logits (batch, V) after the prompts on; `steps` times at most.

    The device works up to a few steps ahead of what is given out, so a caller that stops early has wasted those.
    """
    step = FixedStep(model, state, chooser, record)
    step.tokens.copy_(chooser(logits).unsqueeze(1))
    cuda = step.device.type == "cuda"
    ready: deque[Callable[[], list[int]]] = deque()
    for number in range(steps):
        if number:
            chooser.begun = number
            logits = step()
        ready.append(_fetch(chooser.written[number]))
        if len(ready) > (AHEAD if cuda else 0):
            yield _checked(ready.popleft()(), logits, chooser.vocab_size)
    while ready:
        yield _checked(ready.popleft()(), logits, chooser.vocab_size)


def _fetch(row: Tensor) -> Callable[[], list[int]]:
    """Start to copy tokens (batch,) to the host; the function waits for them."""
    if not row.is_cuda:
        return row.tolist
    host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
    host.copy_(row, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return wait


def _checked(tokens: list[int], logits: Tensor, vocab_size: int) -> list[int]:
    if min(tokens) < 0:
        check_logits(logits[:, :vocab_size])
        raise ModelError("the model gave NaN or infinite logits on the way; its weights are damaged")
    return tokens
