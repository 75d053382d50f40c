"""Every layout of a job over its devices, what each needs and takes, and the fastest that fits.

A step takes what its compute does by the roofline, and the communication that compute does not hide:

tensor      each sublayer sums its result over the devices, forward, and its input's gradient, back: four all-reduces
            a layer (Shoeybi et al. 2019), or with `sequence` as many pairs of a reduce-scatter and an all-gather;
            two more where layers run again. Nothing else can run meanwhile
shard       weights are gathered layer by layer, forward and back, and gradients reduced in fp32, while the layer
            beside is at work (Zhao et al. 2023); a pipeline's stages gather and reduce once a step
replicate   gradients are summed while the last micro-batch runs back
context     keys and values go round a ring, hidden behind the attention over those before (Liu et al. 2023)
pipeline    activations go to the next stage; (p − 1) of m + p − 1 turns are idle (Huang et al. 2019)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.config import assignments, validate
from weft.costs.count import stacks
from weft.costs.layouts import Choice, Job, RankMemory, indivisible, rank_memory, refusal, stage_parameters
from weft.costs.memory import WIDE, narrow
from weft.costs.roofline import OTHER, Part, Seconds
from weft.costs.units import byte_size
from weft.errors import ConfigError
from weft.layout import Layout

HIDDEN = 0.5  # of the time of tensor parallelism's collectives, where they run beside products
ADAMW = 36  # bytes that an update moves for each parameter: all of them in fp32, and the norm
CASTS = 12  # bytes moved for each weight of a pass: its 16-bit copy, and its gradient back in fp32
BESIDE = 0.1  # of a hidden collective's time, by which it slows down what hides it

MAX_OTHERS = 10  # kinds of layouts that are shown besides the best
MAX_MICRO = 64  # rows that one device reads at a time
MAX_TENSOR_MACHINES = 4  # over which a matrix is split
MIN_CONTEXT_TOKENS = 1024  # of a row on each device: of fewer nothing is gained


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest device: `compute`, and what waits for others."""

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
class Prediction:
    """What a choice needs and takes."""

    job: Job
    choice: Choice
    memory: RankMemory
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.job.device.memory

    @property
    def speed(self) -> float:
        """Tokens a second, of all devices."""
        return self.job.rows * self.job.length / self.time.total

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own operations are (Chowdhery et al. 2022, appendix B)."""
        job = self.job
        return self.speed * job.cost.training() / (job.gpus * job.device.peak(job.precision))


class Predictor:
    """Predicts choices of one job; what several of them share is worked out once."""

    def __init__(self, job: Job):
        self.job = job
        self._passes: dict[Part, tuple[list[Seconds], tuple[float, float]]] = {}

    def __call__(self, choice: Choice) -> Prediction:
        return Prediction(self.job, choice, rank_memory(self.job, choice), self.time(choice))

    def time(self, choice: Choice) -> StepTime:
        job, layout, p = self.job, choice.layout, choice.layout.pipeline
        layers, logits = self._pass(choice)
        depths, m = choice.depths(job), choice.batches(job.rows)
        stacked, depth = list(zip(depths, layers, strict=True)), sum(depths)
        forward = OTHER * sum(d * each.forward for d, each in stacked)
        backward = OTHER * sum(d * (each.backward + each.again(choice.recompute)) for d, each in stacked)
        held = stage_parameters(job, choice, first=True, last=True)
        owned = stage_parameters(job, choice, first=p == 1, last=True)
        parameters = (owned["layers"] + owned["around"]) / layout.shard
        copied = layout.shard == 1 and narrow(job.precision) < WIDE
        casts = job.roofline.move(CASTS * parameters) if copied else 0.0
        compute = forward + backward + OTHER * (sum(logits) + casts)
        tensor = self._tensor(choice)
        context = sum(d * self._ring(choice, each) for d, each in stacked)
        between = self._hidden(choice) / (layout.tensor if layout.sequence else 1)
        send = 2 * choice.chunks * choice.group("pipeline", job.net).send(between) if p > 1 else 0.0
        shard = depth * self._shard(choice, held["layer"], (forward / depth, (compute - forward) / depth))
        # what stands around the layers is gathered before any of them is at work
        shard += choice.group("shard", job.net).gather(narrow(job.precision) * owned["around"])
        summing = sum(choice.group(axis, job.net).reduce(WIDE * parameters) for axis in ("replicate", "context"))
        return StepTime(
            compute=m * compute,
            tensor=m * tensor,
            context=m * context,
            send=m * send,
            bubble=(p - 1) / choice.chunks * (compute + tensor + context + send),
            shard=shard * (m if p == 1 else 1),
            # what summing gradients takes longer than the last backward pass, and its last part
            replicate=_beside(summing, backward) + summing / depth,
            update=OTHER * job.roofline.move(ADAMW * parameters),
        )

    def _pass(self, choice: Choice) -> tuple[list[Seconds], tuple[float, float]]:
        job, part = self.job, choice.part(self.job.length)
        if part not in self._passes:
            words = -(-job.vocab_size // part.tensor)
            logits = job.roofline.logits(job.model.d_model, words, round(job.predicted * part.tokens))
            self._passes[part] = job.roofline.layers(job.model, part), logits
        return self._passes[part]

    def _hidden(self, choice: Choice) -> float:
        return choice.part(self.job.length).tokens * narrow(self.job.precision) * self.job.model.d_model

    def _tensor(self, choice: Choice) -> float:
        """The collectives of a micro-batch: of all sublayers, of the embeddings, and of the logits."""
        if choice.layout.tensor == 1:
            return 0.0
        group, bytes_ = choice.group("tensor", self.job.net), self._hidden(choice)
        each = zip(choice.depths(self.job), stacks(self.job.model), strict=False)
        sublayers = sum(depth * (3 if cross else 2) for depth, (_, _, cross) in each)
        once = 2 * group.gather(bytes_) if choice.layout.sequence else group.reduce(bytes_)
        passes = 3 if choice.recompute == 1 else 2
        return (sublayers * passes + 2) * once * (1 - HIDDEN if self.job.software.hidden_tensor else 1)

    def _ring(self, choice: Choice, layer: Seconds) -> float:
        """What the ring of a layer's keys and values takes longer than its attention, forward and back."""
        c, model, n = choice.layout.context, self.job.model, narrow(self.job.precision)
        if c == 1:
            return 0.0
        group, tokens = choice.group("context", self.job.net), choice.part(self.job.length).tokens
        keys = tokens * 2 * model.attention.groups // choice.layout.tensor * model.d_head
        there = max(0.0, (c - 1) * group.send(n * keys) - layer.attention[0])
        back = max(0.0, (c - 1) * group.send((n + WIDE) * keys) - layer.attention[1])
        return there + back + (there if choice.recompute == 1 else 0.0)

    def _shard(self, choice: Choice, parameters: float, compute: tuple[float, float]) -> float:
        """What gathering and reducing take longer than a layer's passes, for one of a stage's layers."""
        if choice.layout.shard == 1:
            return 0.0
        group, depth = choice.group("shard", self.job.net), sum(choice.depths(self.job))
        gather, reduce = group.gather(narrow(self.job.precision) * parameters), group.gather(WIDE * parameters)
        first, last = gather / depth, reduce / depth  # nothing is at work before the first, or after the last
        regather = gather if choice.layout.pipeline == 1 else 0.0
        return first + last + _beside(gather, compute[0]) + _beside(regather + reduce, compute[1])


def _beside(seconds: float, compute: float) -> float:
    """By how much a collective makes compute longer that runs at the same time."""
    return max(0.0, seconds - compute) + BESIDE * min(seconds, compute)


@dataclass(frozen=True)
class Search:
    """What was found: those that fit, fastest first, and of each kind of layout that has none, the least that it needs.

    A kind is the set of axes that a layout uses; copies of sharded weights are no kind of their own.
    """

    job: Job
    fitting: Sequence[Prediction]
    too_large: Sequence[Prediction]
    free: Prediction | None = None  # the best of all layouts, where one was asked for

    @property
    def best(self) -> Prediction:
        """The fastest that fits; where none does, the one that needs least."""
        return self.fitting[0] if self.fitting else min(self.too_large, key=lambda each: each.memory.peak)

    def others(self) -> list[Prediction]:
        """The fastest of each other kind, then the smallest of each kind that never fits. Of many, those that use one
        axis alone, and the first ones of the others."""
        found = {kind(self.best.choice): self.best}
        for each in [*self.fitting, *sorted(self.too_large, key=lambda each: each.memory.peak)]:
            found.setdefault(kind(each.choice), each)
        del found[kind(self.best.choice)]
        plain = [axes for axes in found if len(axes) == 1]
        mixed = [axes for axes in found if len(axes) > 1][: MAX_OTHERS - len(plain)]
        return [each for axes, each in found.items() if axes in plain or axes in mixed]


def search(job: Job, asked: Layout | None = None, micro: int | None = None, recompute: bool | None = None) -> Search:
    """Predict every layout, or the one asked for, with every number of rows at a time, or `micro` of them. `recompute`:
    whether layers run again in the backward pass; both are tried where it is None."""
    predict, fitting = Predictor(job), []
    too_large: dict[tuple[str, ...], tuple[float, Choice]] = {}
    reason, advice = None, "change --layout or --gpus"
    layouts = [asked.over(job.gpus, "--layout", advice)] if asked is not None else list(_layouts(job))
    for layout in layouts:
        for size in _at_a_time(job, layout, micro):
            reason = refusal(job, Choice(layout, size))
            if reason is not None:
                continue
            for share in (0.0, 1.0) if recompute is None else (float(recompute),):
                choice = Choice(layout, size, share)
                peak = rank_memory(job, choice).peak
                if peak <= job.device.memory:  # running layers again would only be slower
                    fitting.append(predict(choice))
                    break
                if peak < too_large.get(kind(choice), (math.inf,))[0]:
                    too_large[kind(choice)] = peak, choice
    if not fitting and not too_large:
        rows = f"{job.rows} rows a step can't be divided over {job.gpus} GPUs; choose --batch as a multiple of it"
        raise ConfigError(f"{'--layout' if asked else f'--gpus {job.gpus}'}: {reason or rows}")
    fitting.sort(key=lambda each: each.time.total)
    known = {kind(each.choice) for each in fitting}
    refused = [predict(choice) for name, (_, choice) in too_large.items() if name not in known]
    free = None if asked is None else search(job, None, micro, recompute).best
    return Search(job, fitting, refused, free)


def kind(choice: Choice) -> tuple[str, ...]:
    """The axes that a layout uses."""
    copies = "replicate" if choice.layout.shard > 1 else None
    return tuple(axis for axis, size in choice.layout.sizes.items() if size > 1 and axis != copies)


def _layouts(job: Job) -> Iterator[Layout]:
    """All sizes that multiply to the number of devices. Where matrices are split, so is what runs between them."""
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


def _at_a_time(job: Job, layout: Layout, micro: int | None) -> list[int]:
    rows = job.rows // layout.readers
    if micro is not None:
        return [min(micro, rows)]
    several = {size for size in (*(1 << power for power in range(7)), rows) if size <= min(rows, MAX_MICRO)}
    return sorted(size for size in several if rows % size == 0)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layout_from(text: str) -> Layout:
    """'tensor=8,sequence=true,pipeline=16' as a layout."""
    words = ("sequence=true" if word == "sequence" else word for word in text.replace(",", " ").split())
    try:
        return validate(Layout, assignments(words))
    except ConfigError as error:
        raise ConfigError(f"--layout: {error}; write it as in --layout tensor=8,sequence=true") from None


# what takes the time of a step → what is said of it where it speaks against a layout
REASONS = {
    "bubble": "bubble",
    "tensor": "all-reduces",
    "shard": "gathering weights",
    "replicate": "summing gradients",
    "context": "the ring of keys and values",
    "send": "sends between stages",
    "compute": "smaller products",
    "update": "updates more weights on each GPU",
}


def why_not(other: Prediction, best: Prediction) -> str:
    choice, device, time = other.choice, other.job.device, other.time
    if not other.fits:
        return f"does not fit: {byte_size(other.memory.peak)} of {byte_size(device.memory)}"
    longer = time.total / best.time.total - 1
    slower = f"{longer:.{0 if longer > 0.01 else 1}%} slower"
    waits = {part: getattr(time, part) - getattr(best.time, part) for part in REASONS}
    part, wait = max(waits.items(), key=lambda item: item[1])
    if wait <= 0:
        return slower
    reason, share = REASONS[part], f"{getattr(time, part) / time.total:.0%}"
    if part == "compute" and choice.recompute > best.choice.recompute:
        reason = "recomputes layers"
    elif part == "compute" and choice.layout.pipeline > best.choice.layout.pipeline:
        reason = "uneven stages"
    elif part == "bubble":
        reason += f" {share}"
    elif part in choice.layout.sizes:  # of one axis
        crosses = choice.layout.sizes[part] > 1 and choice.group(part, other.job.net).crosses
        reason += f"{' between machines' if crosses else ''} {share}"
    return f"{slower}: {reason}"
