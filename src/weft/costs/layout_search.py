"""Every layout of a job over its devices, and the fastest that fits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.config import assignments, validate
from weft.costs.count import stacks
from weft.costs.layout_time import Prediction, Predictor
from weft.costs.layouts import Choice, Job, indivisible, rank_memory, refusal
from weft.costs.units import byte_size
from weft.errors import ConfigError
from weft.layout import Layout

MAX_OTHERS = 10  # kinds of layouts that are shown besides the best
MAX_MICRO = 64  # rows that one device reads at a time
MAX_TENSOR_MACHINES = 4  # over which a matrix is split
MIN_CONTEXT_TOKENS = 1024  # of a row on each device: of fewer nothing is gained


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
        """The fastest of each other kind, then the smallest of each kind that never fits.

        Of many, those that use one axis alone, and the first ones of the others.
        """
        found = {kind(self.best.choice): self.best}
        for each in [*self.fitting, *sorted(self.too_large, key=lambda each: each.memory.peak)]:
            found.setdefault(kind(each.choice), each)
        del found[kind(self.best.choice)]
        plain = [axes for axes in found if len(axes) == 1]
        mixed = [axes for axes in found if len(axes) > 1][: MAX_OTHERS - len(plain)]
        return [each for axes, each in found.items() if axes in plain or axes in mixed]


def search(job: Job, asked: Layout | None = None, micro: int | None = None, recompute: bool | None = None) -> Search:
    """Predict every layout, or the one asked for, with every number of rows at a time, or `micro` of them.

    `recompute`: whether layers run again in the backward pass; both are tried where it is None.
    """
    predict, fitting = Predictor(job), []
    too_large: dict[tuple[str, ...], tuple[float, Choice]] = {}
    advice = "change --layout or --gpus"
    layouts = [asked.over(job.gpus, "--layout", advice)] if asked is not None else list(_layouts(job))
    reason = None
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
    """Rows that one device may read at a time."""
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
    """What speaks against a layout, in a few words."""
    choice, device, time = other.choice, other.job.device, other.time
    if not other.fits:
        return f"does not fit: {byte_size(other.memory.peak)} of {byte_size(device.memory)}"
    longer = time.total / best.time.total - 1
    slower = f"{longer:.{0 if longer > 0.01 else 1}%} slower"
    waits = {part: getattr(time, part) - getattr(best.time, part) for part in REASONS}
    part, most = max(waits.items(), key=lambda wait: wait[1])
    if most <= 0:
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
