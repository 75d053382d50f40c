"""What a training run takes on a named machine, as tables: parts, layouts, memory, hours and energy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config import Config
from weft.costs.count import Count
from weft.costs.devices import Device
from weft.costs.layout_search import Prediction, Search, why_not
from weft.costs.layouts import Choice, Job, RankMemory, rank_memory
from weft.costs.memory import Memory, Workload, cache_bytes, training_memory
from weft.costs.units import byte_size, duration, plain, short
from weft.errors import ConfigError
from weft.figures.tables import Table
from weft.layout import AXES, Layout
from weft.models.config import Decoder
from weft.nn.config import LoRA

PETAFLOP_DAY = 8.64e19  # 10¹⁵ operations a second for a day (Brown et al. 2020)
PUE = 1.1  # what a large data centre draws for each watt that reaches its machines
MAX_BEST = 3  # layouts that are shown as the best ones
MAX_DEVICES = 1 << 14  # that are tried where one has too little memory
MAX_SEQUENCES = 1 << 14  # that are tried on one device at a time


@dataclass(frozen=True)
class Machine:
    """What training runs on, and the share of the peak that it reaches (MFU; Chowdhery et al. 2022, appendix B)."""

    device: Device
    gpus: int
    mfu: float
    precision: str
    basis: str = "assumed; --mfu changes it"  # where that share comes from

    def __post_init__(self) -> None:
        if not 0.0 < self.mfu <= 1.0:
            raise ConfigError(f"--mfu {self.mfu:g}: expected a share of the peak above 0 and at most 1, such as 0.4")

    @property
    def peak(self) -> float:
        return self.gpus * self.device.peak(self.precision)


@dataclass(frozen=True)
class TrainingPlan:
    """A whole training run."""

    tokens: int
    steps: int
    flops: float
    seconds: float
    kilowatt_hours: float


def plan_training(
    flops_per_token: float, tokens: int, tokens_per_step: int, machine: Machine, update: float = 0.0
) -> TrainingPlan:
    """A run over `tokens`, and the operations of each `update` of the weights. MFU counts the model's operations alone:
    recomputed layers are not in `flops_per_token`."""
    steps = -(-tokens // tokens_per_step)
    flops = flops_per_token * tokens + update * steps
    seconds = flops / (machine.peak * machine.mfu)
    energy = machine.gpus * machine.device.watts * PUE * seconds / 3.6e6
    return TrainingPlan(tokens, steps, flops, seconds, energy)


def components_table(name: str, cost: Count) -> Table:
    """The parameters and operations of a model, part by part."""
    rows = [
        (
            part.name,
            f"{part.parameters:,}",
            f"{part.parameters / cost.parameters:.1%}" if cost.parameters else "",
            short(part.flops / cost.length) if part.flops else "",
            f"{cost.share(part):.1%}" if part.flops else "",
        )
        for part in cost.components
    ]
    rows.append(("all", f"{cost.parameters:,}", "", short(cost.forward), ""))
    remarks = [cost.note] if cost.note else []
    if cost.trainable < cost.parameters:
        remarks.append(
            f"{cost.trainable:,} of these are trained, {cost.trainable / cost.parameters:.2%}; the others are frozen."
            f" Training takes {short(cost.training())} FLOPs a token."
        )
    elif cost.parameters:
        remarks.append(
            f"FLOPs are those of the forward pass at {cost.length:,} tokens a sequence. Training takes 3 times as many,"
            f" {short(cost.training())} a token, {short(cost.training(recompute=True))} with activation checkpointing."
            " An m×k by k×n product is 2mkn; attention counts every key of the sequence, also under a causal mask."
        )
    return Table(("part", "parameters", "share", "FLOPs/token", "share"), rows, name, remarks)


def training_table(training: TrainingPlan, machine: Machine, why: str, batch: str) -> Table:
    """A training run in numbers; `why` says where its tokens come from, `batch` how many a step reads."""
    rows = [
        ("tokens", f"{short(training.tokens)} ({why})"),
        ("steps", f"{training.steps:,} of {batch} tokens"),
        ("compute", f"{training.flops:.3g} FLOPs, {plain(training.flops / PETAFLOP_DAY)} petaflop/s-days"),
        ("time", duration(training.seconds)),
        ("speed", f"{short(training.tokens / training.seconds)} tokens/s"),
        ("energy", f"{plain(training.kilowatt_hours)} kWh"),
    ]
    remark = (
        f"At {machine.mfu:.1%} of the peak of {machine.peak / 1e12:,.4g} TFLOP/s ({machine.basis});"
        f" {machine.device.watts:g} W a device, times {PUE} for the building (PUE)."
    )
    title = f"{machine.gpus:,} × {machine.device.title}" if machine.gpus > 1 else machine.device.title
    return Table(("training", machine.precision), rows, title, [remark], text=(0, 1))


def layouts_table(found: Search) -> Table:
    """The best layouts, and the best of each other kind with what speaks against it."""
    job, best = found.job, found.best
    top: list[Prediction] = []
    for each in found.fitting:
        if len(top) < MAX_BEST and all(each.choice.layout != other.choice.layout for other in top):
            top.append(each)
    fastest = found.free or best
    shown = [(each, why_not(each, fastest) if each is not fastest else "the fastest that fits") for each in top]
    if not top:
        shown.append((best, why_not(best, fastest)))
    if found.free is not None and found.free.choice.layout != best.choice.layout:
        shown.append((found.free, "the fastest of all" if found.free.fits else why_not(found.free, found.free)))
    shown += [(each, why_not(each, fastest)) for each in found.others() if each not in top]
    axes = [axis for axis in AXES if any(each.choice.layout.sizes[axis] > 1 for each, _ in shown)]
    net = job.net
    remarks = [
        f"{job.device.title}: {net.inside / 1e9:.4g} GB/s each way inside a machine of {net.machine:,}"
        + (f", {net.across / 1e9:.4g} GB/s a GPU between machines ({net.name})." if job.gpus > net.machine else "."),
        "seq: with parallel.sequence. rows: read at a time by one GPU (batch.micro). recompute: layers run again in the"
        " backward pass (batch.recompute). waits: communication that compute does not hide. Seconds are those of the"
        " slowest stage; in a pipeline it has the logits.",
    ]
    header = (*axes, "rows", "recompute", "memory", "compute", "waits", "bubble", "step", "MFU", "")
    title = f"{job.rows:,} × {job.length:,} tokens a step over {job.gpus:,} GPUs"
    spare = [header.index(name) for name in ("compute", "waits", "bubble", "MFU", "recompute")]
    rows = [_row(each, axes, why) for each, why in shown]
    return Table(header, rows, title, remarks, text=(len(header) - 1,), spare=spare)


def _row(each: Prediction, axes: Sequence[str], remark: str) -> tuple[str, ...]:
    time, choice = each.time, each.choice
    sizes = {axis: str(size) if size > 1 else "" for axis, size in choice.layout.sizes.items()}
    sizes["tensor"] += " seq" if choice.layout.sequence else ""
    waits = time.tensor + time.context + time.send + time.shard + time.replicate
    return (
        *(sizes[axis] for axis in axes),
        str(choice.micro),
        "yes" if choice.recompute else "",
        byte_size(each.memory.peak),
        _seconds(time.compute + time.update),
        _seconds(waits) if waits else "",
        f"{time.bubble / time.total:.0%}" if time.bubble else "",
        _seconds(time.total),
        f"{each.mfu:.0%}",
        remark,
    )


def _seconds(seconds: float) -> str:
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1e3 * seconds)} ms"


# ---- memory

PARTS = {"weights": "weights", "copies": "16-bit copies", "gradients": "gradients", "optimizer": "optimizer"}
PARTS |= {"activations": "activations", "logits": "logits", "passing": "passing through"}


def device_table(best: Prediction, machine: Machine) -> Table:
    """What the fullest device holds under a layout, how many sequences fit on it, and what generation takes."""
    job, memory = best.job, best.memory
    max_sequences = [_fitting(job, replace(best.choice, recompute=share)) for share in (0.0, 1.0)]
    remarks = [_fits(job.device, job.length, max_sequences, _sharing(job))]
    if not memory.accumulates:
        remarks.append("Gradients come as activations go; the peak has one or the other.")
    rows = [*_parts(memory), ("at the peak", byte_size(memory.peak))]
    title = _at_a_time(best.choice.micro, job.length, machine.gpus)
    title += ", layers recomputed" if best.choice.recompute else ""
    return Table(("memory", job.precision), rows, title, [*remarks, *_generation(job.model, job.cost, machine)])


def memory_table(model: Config, cost: Count, work: Workload, machine: Machine, adapter: LoRA | None = None) -> Table:
    """The same for a model that no layout is searched for."""
    kept = training_memory(model, work, adapter)
    each = training_memory(model, replace(work, sequences=1), adapter)
    free = machine.device.memory - each.fixed - each.logits
    left = free + each.fixed - each.recomputed
    sharing = -(-each.fixed * machine.gpus // left) if left > 0 else None
    max_sequences = [free // each.activations, free // each.recomputed]
    remarks = [_fits(machine.device, work.length, max_sequences, sharing), *_generation(model, cost, machine)]
    fewer = ("all, with activation checkpointing", byte_size(kept.total(recompute=True)))
    rows = [*_parts(kept), ("all", byte_size(kept.total())), fewer]
    return Table(("memory", work.precision), rows, _at_a_time(work.sequences, work.length, machine.gpus), remarks)


def _parts(memory: Memory | RankMemory) -> list[tuple[str, str]]:
    sizes = {name: getattr(memory, key, 0) for key, name in PARTS.items()}
    return [(name, byte_size(size)) for name, size in sizes.items() if size]


def _at_a_time(sequences: int, length: int, gpus: int) -> str:
    apiece = f", on each of {gpus:,} devices" if gpus > 1 else ""
    return f"{sequences} × {length:,} tokens at a time{apiece}"


def _fits(device: Device, length: int, max_sequences: Sequence[int], sharing: int | None) -> str:
    """How many sequences fit at a time, without recomputing and with it; or how many devices could share one."""
    plainly, recomputed = max_sequences
    if plainly > 0:
        fits = f"enough for about {plainly:,} sequences at a time, {recomputed:,} with activation checkpointing."
    elif recomputed > 0:
        fits = f"enough for about {recomputed:,} sequences at a time, with activation checkpointing."
    elif sharing is not None:
        fits = f"too little for even one sequence at a time; {sharing:,} could share it (--gpus)."
    else:
        fits = f"too little for one sequence of {length:,} tokens."
    return f"{device.title} has {byte_size(device.memory)}: {fits}"


def _sharing(job: Job) -> int | None:
    """The least power of two of devices that can share the weights, with one recomputed sequence on each."""

    def fits_on(gpus: int) -> bool:
        choice = Choice(Layout(replicate=1, shard=gpus), 1, 1.0)
        return rank_memory(replace(job, rows=gpus), choice).peak <= job.device.memory

    several = (1 << power for power in range(1, MAX_DEVICES.bit_length()))
    return next((gpus for gpus in several if gpus > job.gpus and fits_on(gpus)), None)


def _fitting(job: Job, choice: Choice) -> int:
    batches = choice.batches(job.rows)

    def too_many(sequences: int) -> bool:
        larger = replace(job, rows=sequences * choice.layout.readers * batches)
        return rank_memory(larger, replace(choice, micro=sequences)).peak > job.device.memory

    return bisect_left(range(1, MAX_SEQUENCES + 1), True, key=too_many)


def _generation(model: Config, cost: Count, machine: Machine) -> list[str]:
    cache, halves = cache_bytes(model, machine.precision), 2 * cost.multiplied
    if not cache:
        return []
    small = f" ({byte_size(cache_bytes(model, 'int8'))} in int8)" if isinstance(model, Decoder) else ""
    return [
        f"Generation caches {byte_size(cache)} a token{small}, {byte_size(cache * cost.length)} for {cost.length:,}."
        f" Each token reads {byte_size(halves)} of 16-bit weights,"
        f" so one sequence gets at most {short(machine.device.bandwidth / halves)} tokens/s."
    ]
