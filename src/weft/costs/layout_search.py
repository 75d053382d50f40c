"""Search the layouts of a job over its devices for the fastest that fits, and explain the others.

A step takes its compute by the roofline, and the communication that compute does not hide:

tensor      each sublayer all-reduces its result forward, and its input's gradient backward: four all-reduces per layer
            (Shoeybi et al. 2019), or with `sequence` as many pairs of a reduce-scatter and an all-gather; two more if
            layers are recomputed. Nothing else runs meanwhile
shard       weights are gathered layer by layer, forward and backward, and gradients reduced in fp32, while the
            neighbouring layer computes (Zhao et al. 2023); pipeline stages gather and reduce once per step
replicate   gradients are all-reduced during the backward pass of the last micro-batch
context     keys and values travel around a ring, hidden by the attention over the previous ones (Liu et al. 2023)
pipeline    activations are sent to the next stage; (p − 1) of m + p − 1 turns are idle (Huang et al. 2019)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.config import assignments, validate
from weft.costs.layouts import LayoutChoice, RankMemory, TrainingJob, indivisible, rank_memory, refusal
from weft.costs.linears import stacks
from weft.costs.memory import WIDE, narrow
from weft.costs.roofline import OTHER, MicroBatch, Seconds
from weft.costs.units import byte_size
from weft.errors import ConfigError
from weft.figures.prose import prose
from weft.layout import Layout

TEXTS = prose(__file__)
HIDDEN = 0.5  # fraction of the time of tensor-parallel collectives that is hidden if they overlap with products
UPDATE_BYTES = 36  # bytes that AdamW moves per parameter and update: all of them in fp32, and the gradient norm
CAST_BYTES = 12  # bytes moved per weight and pass: its 16-bit copy, and its gradient to fp32
INTERFERENCE = 0.1  # fraction of a hidden collective's time by which it slows down the compute that hides it

MAX_OTHERS = 10  # kinds of layouts that are shown besides the best
MAX_MICRO = 64  # sequences per micro-batch that are tried
MAX_TENSOR_MACHINES = 4  # machines that a matrix is split over
MIN_CONTEXT_TOKENS = 1024  # tokens of a sequence per device, below which splitting it gains nothing


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on the slowest device: `compute`, and waiting for communication, by cause."""

    compute: float
    tensor: float
    context: float
    send: float
    bubble: float
    shard: float
    replicate: float
    update: float

    @property
    def total(self) -> float:
        waits = self.tensor + self.context + self.send + self.bubble + self.shard + self.replicate
        return self.compute + waits + self.update


@dataclass(frozen=True)
class LayoutPrediction:
    """Predicted memory and time of a layout."""

    job: TrainingJob
    choice: LayoutChoice
    memory: RankMemory
    time: StepSeconds

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.job.device.memory

    @property
    def speed(self) -> float:
        """Tokens per second over all devices."""
        return self.job.rows * self.job.length / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""
        job = self.job
        return self.speed * job.cost.training() / (job.gpus * job.device.peak(job.precision))


class Predictor:
    """Predict layouts of one job; passes that several layouts share are computed once."""

    def __init__(self, job: TrainingJob):
        self.job = job
        self._passes: dict[MicroBatch, tuple[list[Seconds], tuple[float, float]]] = {}

    def __call__(self, choice: LayoutChoice) -> LayoutPrediction:
        return LayoutPrediction(self.job, choice, memory=rank_memory(self.job, choice), time=self.time(choice))

    def time(self, choice: LayoutChoice) -> StepSeconds:
        job, layout, p = self.job, choice.layout, choice.layout.pipeline
        layers, logits = self._pass(choice)
        depths, m = choice.depths(job), choice.batches(job.rows)
        stacked, depth = list(zip(depths, layers, strict=True)), sum(depths)
        forward = OTHER * sum(d * layer.forward for d, layer in stacked)
        backward = OTHER * sum(d * (layer.backward + layer.recompute(choice.recompute)) for d, layer in stacked)
        largest = choice.parameters(job, first=True, last=True)
        owned = choice.parameters(job, first=p == 1, last=True)
        parameters = (owned["layers"] + owned["around"]) / layout.shard
        has_copies = layout.shard == 1 and narrow(job.precision) < WIDE
        casts = job.roofline.move(CAST_BYTES * parameters) if has_copies else 0.0
        compute = forward + backward + OTHER * (sum(logits) + casts)
        tensor = self._tensor(choice)
        context = sum(d * self._ring(choice, layer) for d, layer in stacked)
        boundary = self._hidden_bytes(choice) / (layout.tensor if layout.sequence else 1)
        send = 2 * choice.chunks * choice.group("pipeline", job.net).send(boundary) if p > 1 else 0.0
        shard = depth * self._shard(choice, largest["layer"], (forward / depth, (compute - forward) / depth))
        # weights outside the layers are gathered before any layer computes
        shard += choice.group("shard", job.net).gather(narrow(job.precision) * owned["around"])
        reduce = sum(choice.group(axis, job.net).reduce(WIDE * parameters) for axis in ("replicate", "context"))
        return StepSeconds(
            compute=m * compute,
            tensor=m * tensor,
            context=m * context,
            send=m * send,
            bubble=(p - 1) / choice.chunks * (compute + tensor + context + send),
            shard=shard * (m if p == 1 else 1),
            # the all-reduce overlaps with the last backward pass, except for the last layer's gradients
            replicate=_exposed(reduce, backward) + reduce / depth,
            update=OTHER * job.roofline.move(UPDATE_BYTES * parameters),
        )

    def _pass(self, choice: LayoutChoice) -> tuple[list[Seconds], tuple[float, float]]:
        job, batch = self.job, choice.micro_batch(self.job.length)
        if batch not in self._passes:
            V = -(-job.vocab_size // batch.tensor)
            logits = job.roofline.logits(job.model.d_model, V, round(job.predicted * batch.tokens))
            self._passes[batch] = job.roofline.layers(job.model, batch), logits
        return self._passes[batch]

    def _hidden_bytes(self, choice: LayoutChoice) -> float:
        return choice.micro_batch(self.job.length).tokens * narrow(self.job.precision) * self.job.model.d_model

    def _tensor(self, choice: LayoutChoice) -> float:
        """Return the seconds of a micro-batch's collectives: of all sublayers, the embeddings and the logits."""
        if choice.layout.tensor == 1:
            return 0.0
        group, bytes_ = choice.group("tensor", self.job.net), self._hidden_bytes(choice)
        per_stack = zip(choice.depths(self.job), stacks(self.job.model), strict=False)
        sublayers = sum(depth * (3 if cross else 2) for depth, (_, _, cross) in per_stack)
        collective = 2 * group.gather(bytes_) if choice.layout.sequence else group.reduce(bytes_)
        passes = 3 if choice.recompute == 1 else 2
        return (sublayers * passes + 2) * collective * (1 - HIDDEN if self.job.software.hidden_tensor else 1)

    def _ring(self, choice: LayoutChoice, layer: Seconds) -> float:
        """Return the seconds by which the ring of a layer's keys and values exceeds its attention."""
        c, model, n = choice.layout.context, self.job.model, narrow(self.job.precision)
        if c == 1:
            return 0.0
        group, tokens = choice.group("context", self.job.net), choice.micro_batch(self.job.length).tokens
        _, heads, width = model.cache_shape
        keys = tokens * 2 * max(1, heads // choice.layout.tensor) * width
        forward = max(0.0, (c - 1) * group.send(n * keys) - layer.attention[0])
        backward = max(0.0, (c - 1) * group.send((n + WIDE) * keys) - layer.attention[1])
        return forward + backward + (forward if choice.recompute == 1 else 0.0)

    def _shard(self, choice: LayoutChoice, parameters: float, compute: tuple[float, float]) -> float:
        """Return the seconds by which gathering and reducing delay one of a stage's layers."""
        if choice.layout.shard == 1:
            return 0.0
        group, depth = choice.group("shard", self.job.net), sum(choice.depths(self.job))
        gather, reduce = group.gather(narrow(self.job.precision) * parameters), group.gather(WIDE * parameters)
        first, last = gather / depth, reduce / depth  # no compute hides the first gather and the last reduction
        regather = gather if choice.layout.pipeline == 1 else 0.0
        return first + last + _exposed(gather, compute[0]) + _exposed(regather + reduce, compute[1])


def _exposed(seconds: float, compute: float) -> float:
    """Return the seconds by which a collective delays the compute that it overlaps with."""
    return max(0.0, seconds - compute) + INTERFERENCE * min(seconds, compute)


@dataclass(frozen=True)
class LayoutSearch:
    """Layouts that fit, fastest first, and for each kind (set of axes) without one, that of the least memory."""

    job: TrainingJob
    fitting: Sequence[LayoutPrediction]
    too_large: Sequence[LayoutPrediction]
    free: LayoutPrediction | None = None  # the best of all layouts, if one was requested

    @property
    def best(self) -> LayoutPrediction:
        """The fastest that fits, or if none does, the one that needs the least memory."""
        return self.fitting[0] if self.fitting else min(self.too_large, key=lambda layout: layout.memory.peak)

    def others(self) -> list[LayoutPrediction]:
        """Return the fastest of each other kind, then the smallest of each that never fits."""
        by_kind = {kind(self.best.choice): self.best}
        for layout in [*self.fitting, *sorted(self.too_large, key=lambda layout: layout.memory.peak)]:
            by_kind.setdefault(kind(layout.choice), layout)
        del by_kind[kind(self.best.choice)]
        single = [axes for axes in by_kind if len(axes) == 1]  # of many kinds, these and the first of the others
        mixed = [axes for axes in by_kind if len(axes) > 1][: MAX_OTHERS - len(single)]
        return [layout for axes, layout in by_kind.items() if axes in single or axes in mixed]


def search(
    job: TrainingJob, layout: Layout | None = None, *, micro: int | None = None, recompute: bool | None = None
) -> LayoutSearch:
    """Predict every layout, or only `layout`, with every micro-batch size, or only `micro`.

    `recompute` is whether layers are recomputed in the backward pass; None tries both.
    """
    predict, fitting = Predictor(job), []
    too_large: dict[tuple[str, ...], tuple[float, LayoutChoice]] = {}
    reason, hint = None, "change --layout or --gpus"
    for candidate in _layouts(job) if layout is None else [layout.over(job.gpus, "--layout", hint)]:
        for size in _micro_sizes(job, candidate, micro):
            reason = refusal(job, LayoutChoice(candidate, size))
            if reason is not None:
                continue
            for share in (0.0, 1.0) if recompute is None else (float(recompute),):
                choice = LayoutChoice(candidate, size, share)
                peak = rank_memory(job, choice).peak
                if peak <= job.device.memory:  # recomputing would only be slower
                    fitting.append(predict(choice))
                    break
                if peak < too_large.get(kind(choice), (math.inf,))[0]:
                    too_large[kind(choice)] = peak, choice
    if not fitting and not too_large:
        rows = f"{job.rows} rows per step can't be divided over {job.gpus} GPUs; choose --batch as a multiple of it"
        raise ConfigError(f"{'--layout' if layout else f'--gpus {job.gpus}'}: {reason or rows}")
    fitting.sort(key=lambda layout: layout.time.total)
    kinds = {kind(layout.choice) for layout in fitting}
    unfit = [predict(choice) for axes, (_, choice) in too_large.items() if axes not in kinds]
    free = None if layout is None else search(job, micro=micro, recompute=recompute).best
    return LayoutSearch(job, fitting, unfit, free=free)


def kind(choice: LayoutChoice) -> tuple[str, ...]:
    """Return the axes that a layout uses."""
    ignored = "replicate" if choice.layout.shard > 1 else None
    return tuple(axis for axis, size in choice.layout.sizes.items() if size > 1 and axis != ignored)


def _layouts(job: TrainingJob) -> Iterator[Layout]:
    """Yield all mesh sizes that multiply to the number of devices, with sequence parallelism if it is possible."""
    for t in _divisors(job.gpus):
        if indivisible(job.model, t) or t > MAX_TENSOR_MACHINES * job.net.machine:
            continue
        for c in _divisors(job.gpus // t):
            sequence = t > 1 and job.length % (t * c) == 0
            if job.length % c or (c > 1 and job.length // c < MIN_CONTEXT_TOKENS):
                continue
            for p in _divisors(job.gpus // (t * c)):
                if p > job.layers or (p > 1 and len(stacks(job.model)) > 1):
                    continue
                readers = job.gpus // (t * c * p)
                if job.rows % readers:
                    continue
                for s in _divisors(readers):
                    yield Layout(replicate=readers // s, shard=s, tensor=t, sequence=sequence, context=c, pipeline=p)


def _micro_sizes(job: TrainingJob, layout: Layout, micro: int | None) -> list[int]:
    rows = job.rows // layout.readers
    if micro is not None:
        return [min(micro, rows)]
    sizes = {size for size in (*(1 << power for power in range(7)), rows) if size <= min(rows, MAX_MICRO)}
    return sorted(size for size in sizes if rows % size == 0)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layout_from(text: str) -> Layout:
    """Parse a layout such as 'tensor=8,sequence=true,pipeline=16'."""
    words = ("sequence=true" if word == "sequence" else word for word in text.replace(",", " ").split())
    try:
        return validate(Layout, assignments(words))
    except ConfigError as error:
        raise ConfigError(f"--layout: {error}; write it as in --layout tensor=8,sequence=true") from None


def why_not(other: LayoutPrediction, best: LayoutPrediction) -> str:
    """Say in a few words why a layout is worse than the best."""
    choice, device, time = other.choice, other.job.device, other.time
    if not other.fits:
        return f"does not fit: {byte_size(other.memory.peak)} of {byte_size(device.memory)}"
    excess = time.total / best.time.total - 1
    slower = f"{excess:.{0 if excess > 0.01 else 1}%} slower"
    differences = {part: getattr(time, part) - getattr(best.time, part) for part in vars(time)}
    part, difference = max(differences.items(), key=lambda item: item[1])
    if difference <= 0:
        return slower
    reason, share = TEXTS[f"reason-{part}"], f"{getattr(time, part) / time.total:.0%}"
    if part == "compute" and choice.recompute > best.choice.recompute:
        reason = "recomputes layers"
    elif part == "compute" and choice.layout.pipeline > best.choice.layout.pipeline:
        reason = "uneven stages"
    elif part == "bubble":
        reason += f" {share}"
    elif part in choice.layout.sizes:
        crosses = choice.layout.sizes[part] > 1 and choice.group(part, other.job.net).machines > 1
        reason += f"{' between machines' if crosses else ''} {share}"
    return f"{slower}: {reason}"
