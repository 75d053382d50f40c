"""The time of a training step: what the count of its operations predicts, and what the clock says.

Prediction and measurement are of one machine in one run. The machine's speed is that of plain matrix products, and its
bandwidth that of a plain copy, so the prediction is a lower bound that no step of this model can beat by much: all that
is not a product (norms, softmax, activations, optimizer, Python itself) is not in it.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.costs.count import count
from weft.costs.devices import device_called
from weft.costs.units import byte_size, short
from weft.errors import ModelError, counted
from weft.explain.reading import SourceTokens
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, Series
from weft.figures.tables import Table
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau, EncoderDecoder

REPEATS = 5
MAX_MATRIX = {"cpu": 1024, "cuda": 8192}  # rows of those that the machine's speed is measured with
COPIED_BYTES = 1 << 28  # more than a processor's caches hold


@dataclass(frozen=True)
class StepTime(Charts):
    """Seconds of a forward and a backward pass over `batch` × `length` tokens, and what they are compared with."""

    device: str
    batch: int
    length: int
    measured: tuple[float, ...]  # seconds of each repeat
    flops: float  # of a step, counted
    speed: float  # operations a second in plain products, measured
    traffic: float  # bytes of weights and gradients that a step moves at least
    bandwidth: float  # bytes a second of a plain copy, measured
    peak: float | None  # operations a second on the device's data sheet, where it is known

    title = "A training step: predicted and measured"
    about = TEXTS["timing"]

    @property
    def seconds(self) -> float:
        return median(self.measured)

    @property
    def compute_bound(self) -> float:
        """Seconds that the products alone would take."""
        return self.flops / self.speed

    @property
    def memory_bound(self) -> float:
        """Seconds that moving the weights and their gradients alone would take."""
        return self.traffic / self.bandwidth

    @property
    def predicted(self) -> float:
        """The larger of both: no step is faster."""
        return max(self.compute_bound, self.memory_bound)

    def tables(self) -> list[Table]:
        achieved = self.flops / self.seconds
        rows = [
            ("operations of a step, counted", f"{short(self.flops)} FLOPs"),
            ("plain matrix products, measured", f"{short(self.speed)} FLOP/s"),
            ("products alone would take", _seconds(self.compute_bound)),
            ("weights and gradients, moved at least", byte_size(self.traffic)),
            ("a plain copy, measured", f"{byte_size(self.bandwidth)}/s"),
            ("moving them alone would take", _seconds(self.memory_bound)),
            ("predicted: the larger of both", _seconds(self.predicted)),
            (f"measured, median of {len(self.measured)}", _seconds(self.seconds)),
            ("measured / predicted", f"{self.seconds / self.predicted:.2f}"),
            ("achieved", f"{short(achieved)} FLOP/s"),
            ("share of the plain products' speed", f"{achieved / self.speed:.0%}"),
        ]
        if self.peak is not None:
            rows.append(("share of the data sheet's peak (MFU)", f"{achieved / self.peak:.0%}"))
        return [Table(("", ""), rows, self._step)]

    @property
    def _step(self) -> str:
        return f"A step of {self.batch} × {counted(self.length, 'token')} on {self.device}"

    def charts(self) -> list[Plot]:
        seconds = {"products alone": self.compute_bound, "memory alone": self.memory_bound, "measured": self.seconds}
        labels = list(map(_seconds, seconds.values()))
        bars = Series(points=list(enumerate(seconds.values())), bars=True, labels=labels)
        x = Axis(ticks=dict(enumerate(seconds)), holds=(-0.5, 2.5))
        return [Plot(self._step, [bars], x, Axis("seconds a step", holds=(0.0,), pad=0.15))]


def step_time(model: LanguageModel, length: int, batch: int = 1, repeats: int = REPEATS) -> StepTime:
    """Time a few forward and backward passes of a model as it stands, over random tokens; its weights don't change."""
    if min(length, batch, repeats) < 1:
        raise ModelError(f"{batch} × {length} tokens, {repeats} times: each has to be at least 1")
    cost = count(model.config, length)
    if not cost.parameters:
        raise ModelError("an n-gram model learns by counting; it has no training step to time")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ModelError("all weights are frozen: there is no training step to time")
    with evaluating(model) as device:
        given = _random(model, (batch, length), device)

        def step() -> None:  # gradients are thrown away, so that those of the model stay as they are
            with torch.enable_grad():
                torch.autograd.grad(_loss(model(**given), given["tokens"]), weights, allow_unused=True)

        step()  # the first one also allocates, and picks its kernels
        measured = tuple(_clock(step, device) for _ in range(repeats))
        speed, bandwidth = _speed(device, weights[0].dtype), _bandwidth(device)
    names = {"cpu": f"the processor ({counted(torch.get_num_threads(), 'thread')})"}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else names.get(device.type, device.type)
    sheet = device_called(name) if device.type == "cuda" else None
    flops, traffic = cost.training() * batch * length, 3.0 * weights[0].element_size() * cost.parameters
    peak = None if sheet is None else sheet.peak({torch.float32: "fp32"}.get(weights[0].dtype, "bf16"))
    return StepTime(name, batch, length, measured, flops, speed, traffic, bandwidth, peak)


def _random(model: LanguageModel, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Tokens for a step, (batch, length), and a source as long where the model reads one."""
    rng = torch.Generator().manual_seed(0)
    settings: Any = model.config
    given: dict[str, Any] = {"tokens": torch.randint(0, settings.vocab_size, shape, generator=rng).to(device)}
    if isinstance(settings, EncoderDecoder | Bahdanau):
        size = settings.source_vocab_size or settings.vocab_size
        given["source"] = SourceTokens(torch.randint(0, size, shape, generator=rng).to(device))
    return given


def _loss(out: Any, tokens: Tensor) -> Tensor:
    """Cross-entropy where the model gives logits of words at each place; the sum of what another head gives."""
    words: Tensor = out.words if hasattr(out, "words") else out
    if words.dim() == 3 and words.shape[:2] == tokens.shape:
        return F.cross_entropy(words.flatten(0, 1).float(), tokens.flatten() % words.shape[-1])
    return words.float().sum()


def _clock(run: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def _speed(device: torch.device, kind: torch.dtype) -> float:
    """Operations a second of the fastest plain product of square matrices."""
    best, size = 0.0, 512
    while size <= MAX_MATRIX.get(device.type, 1024):
        a = torch.rand(size, size, device=device).to(kind)
        torch.mm(a, a)
        best = max(best, 2 * size**3 / min(_clock(partial(torch.mm, a, a), device) for _ in range(6)))
        size *= 2
    return best


@torch.no_grad()
def _bandwidth(device: torch.device) -> float:
    here = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    there.copy_(here)
    return 2 * COPIED_BYTES / min(_clock(lambda: there.copy_(here), device) for _ in range(3))


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
