"""Time of a training step: predicted from its counted operations, and measured.

Both refer to the same machine in the same run. The machine's speed is that of plain matrix products and its bandwidth
that of a plain copy, so the prediction is a lower bound: everything but the products (norms, softmax, activations, the
optimizer, Python) is left out.
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
MAX_MATRIX = {"cpu": 1024, "cuda": 8192}  # rows of the largest square matrix used to measure the machine's speed
COPIED_BYTES = 1 << 28  # larger than a processor's caches


@dataclass(frozen=True)
class StepTiming(Charts):
    """Seconds of a forward and backward pass over `batch` × `length` tokens, and the machine's limits."""

    device: str
    batch: int
    length: int
    measured: tuple[float, ...]  # seconds of each repetition
    flops: float  # counted operations of a step
    speed: float  # measured operations per second of plain matrix products
    traffic: float  # minimum bytes of weights and gradients that a step moves
    bandwidth: float  # measured bytes per second of a plain copy
    peak: float | None  # operations per second on the device's data sheet, if known

    title = "A training step: predicted and measured"
    about = TEXTS["timing"]

    @property
    def seconds(self) -> float:
        return median(self.measured)

    @property
    def bounds(self) -> tuple[float, float]:
        """Seconds of the matrix products alone, and of moving the weights and their gradients alone."""
        return self.flops / self.speed, self.traffic / self.bandwidth

    @property
    def predicted(self) -> float:
        """Lower bound of a step, in seconds."""
        return max(self.bounds)

    def tables(self) -> list[Table]:
        achieved = self.flops / self.seconds
        rows = [
            ("operations of a step, counted", f"{short(self.flops)} FLOPs"),
            ("plain matrix products, measured", f"{short(self.speed)} FLOP/s"),
            ("products alone would take", _seconds(self.bounds[0])),
            ("weights and gradients, minimum moved", byte_size(self.traffic)),
            ("plain copy, measured", f"{byte_size(self.bandwidth)}/s"),
            ("moving them alone would take", _seconds(self.bounds[1])),
            ("predicted: the larger of the two", _seconds(self.predicted)),
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
        seconds = dict(zip(("products alone", "memory alone", "measured"), (*self.bounds, self.seconds), strict=True))
        heights = list(seconds.values())
        bars = Series(points=list(enumerate(heights)), bars=True, labels=list(map(_seconds, heights)))
        x = Axis(ticks=dict(enumerate(seconds)), includes=(-0.5, 2.5))
        return [Plot(self._step, [bars], x, Axis("seconds per step", includes=(0.0,), pad=0.15))]


def step_time(model: LanguageModel, length: int, batch: int = 1, *, repeats: int = REPEATS) -> StepTiming:
    """Time forward and backward passes of a model over random tokens; its weights and gradients do not change."""
    if min(length, batch, repeats) < 1:
        raise ModelError(f"{batch} × {length} tokens, {repeats} times: each has to be at least 1")
    cost = count(model.config, length)
    if not cost.parameters:
        raise ModelError("an n-gram model learns by counting; it has no training step to time")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ModelError("all weights are frozen: there is no training step to time")
    with evaluating(model) as device:
        inputs = _random_inputs(model, (batch, length), device)

        def step() -> None:  # autograd.grad leaves the model's own gradients alone
            with torch.enable_grad():
                torch.autograd.grad(_loss(model(**inputs), inputs["tokens"]), weights, allow_unused=True)

        step()  # warm-up: allocates memory and selects kernels
        measured = tuple(_clock(step, device) for _ in range(repeats))
        speed = _speed(device, weights[0].dtype)
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        bandwidth = 2 * COPIED_BYTES / min(_clock(lambda: target.copy_(source), device) for _ in range(3))
    name = f"the processor ({counted(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else device.type
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    sheet = device_called(name) if device.type == "cuda" else None
    flops, traffic = cost.training() * batch * length, 3.0 * weights[0].element_size() * cost.parameters
    peak = None if sheet is None else sheet.peak({torch.float32: "fp32"}.get(weights[0].dtype, "bf16"))
    rates: dict[str, Any] = {"speed": speed, "traffic": traffic, "bandwidth": bandwidth, "peak": peak}
    return StepTiming(name, batch, length, measured=measured, flops=flops, **rates)


def _random_inputs(model: LanguageModel, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Return tokens (batch, length), and a source of the same length if the model reads one."""
    rng = torch.Generator().manual_seed(0)
    settings: Any = model.config
    inputs: dict[str, Any] = {"tokens": torch.randint(0, settings.vocab_size, shape, generator=rng).to(device)}
    if isinstance(settings, EncoderDecoder | Bahdanau):
        size = settings.source_vocab_size or settings.vocab_size
        inputs["source"] = SourceTokens(torch.randint(0, size, shape, generator=rng).to(device))
    return inputs


def _loss(out: Any, tokens: Tensor) -> Tensor:
    """Return the cross-entropy if the model gives logits at each position; else the sum of its output."""
    logits: Tensor = out.words if hasattr(out, "words") else out
    if logits.dim() == 3 and logits.shape[:2] == tokens.shape:
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten() % logits.shape[-1])
    return logits.float().sum()


def _clock(run: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second of the fastest product of square matrices."""
    best, size = 0.0, 512
    while size <= MAX_MATRIX.get(device.type, 1024):
        a = torch.rand(size, size, device=device).to(dtype)
        torch.mm(a, a)
        best = max(best, 2 * size**3 / min(_clock(partial(torch.mm, a, a), device) for _ in range(6)))
        size *= 2
    return best


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
