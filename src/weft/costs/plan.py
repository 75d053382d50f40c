"""Tables of a planned training run: components, layouts, memory, time and energy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config import Config
from weft.costs.count import Count
from weft.costs.devices import Device
from weft.costs.layout_search import LayoutPrediction, LayoutSearch, why_not
from weft.costs.layouts import LayoutChoice, RankMemory, TrainingJob, rank_memory
from weft.costs.memory import Memory, Workload, cache_bytes, training_memory
from weft.costs.units import byte_size, duration, plain, short
from weft.errors import ConfigError
from weft.figures.prose import prose
from weft.figures.tables import Table
from weft.layout import AXES, Layout
from weft.models.config import Decoder
from weft.nn.config import LoRA

TEXTS = prose(__file__)
PETAFLOP_DAY = 8.64e19  # FLOPs of 10¹⁵ FLOP/s for a day (Brown et al. 2020)
PUE = 1.1  # power that a large data centre draws per watt of its machines
MAX_BEST = 3  # layouts shown as the best
MAX_DEVICES = 1 << 14  # devices that are tried if one has too little memory
MAX_SEQUENCES = 1 << 14  # sequences per micro-batch that are tried


@dataclass(frozen=True)
class Machine:
    """Devices of a training run, and their model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B)."""

    device: Device
    gpus: int
    mfu: float
    precision: str
    basis: str = "assumed; --mfu changes it"  # where the MFU comes from

    def __post_init__(self) -> None:
        if not 0.0 < self.mfu <= 1.0:
            raise ConfigError(f"--mfu {self.mfu:g}: expected a fraction of the peak above 0 and at most 1, such as 0.4")

    @property
    def peak(self) -> float:
        return self.gpus * self.device.peak(self.precision)


@dataclass(frozen=True)
class TrainingPlan:
    """Length, compute, time and energy of a training run."""

    tokens: int
    steps: int
    flops: float
    seconds: float
    kilowatt_hours: float


def plan_training(
    flops_per_token: float, tokens: int, tokens_per_step: int, *, machine: Machine, update_flops: float = 0.0
) -> TrainingPlan:
    """Plan a run over `tokens`, with `update_flops` per optimizer step.

    MFU counts only the model's FLOPs: recomputed layers are not in `flops_per_token`.
    """
    steps = -(-tokens // tokens_per_step)
    flops = flops_per_token * tokens + update_flops * steps
    seconds = flops / (machine.peak * machine.mfu)
    energy = machine.gpus * machine.device.watts * PUE * seconds / 3.6e6
    return TrainingPlan(tokens, steps, flops, seconds=seconds, kilowatt_hours=energy)


def components_table(name: str, cost: Count) -> Table:
    """Return the parameters and FLOPs of a model, per component."""
    rows = []
    for part in cost.components:
        share = f"{part.parameters / cost.parameters:.1%}" if cost.parameters else ""
        flops = (short(part.flops / cost.length), f"{cost.share(part):.1%}") if part.flops else ("", "")
        rows.append((part.name, f"{part.parameters:,}", share, *flops))
    rows.append(("total", f"{cost.parameters:,}", "", short(cost.forward), ""))
    remarks = [cost.note] if cost.note else []
    if cost.active < cost.parameters:
        remarks.append(TEXTS["active"].format(active=cost.active, share=cost.active / cost.parameters))
    if cost.trainable < cost.parameters:
        trained, training = cost.trainable / cost.parameters, short(cost.training())
        remarks.append(TEXTS["frozen"].format(trainable=cost.trainable, share=trained, training=training))
    elif cost.parameters:
        training, recomputed = short(cost.training()), short(cost.training(recompute=True))
        remarks.append(TEXTS["forward"].format(length=cost.length, training=training, recomputed=recomputed))
    return Table(("part", "parameters", "share", "FLOPs/token", "share"), rows, name, remarks)


def training_table(training: TrainingPlan, machine: Machine, *, basis: str, batch: str) -> Table:
    """Return a training run; `basis` says where its number of tokens comes from, `batch` how many a step reads."""
    rows = [
        ("tokens", f"{short(training.tokens)} ({basis})"),
        ("steps", f"{training.steps:,} of {batch} tokens"),
        ("compute", f"{training.flops:.3g} FLOPs, {plain(training.flops / PETAFLOP_DAY)} petaflop/s-days"),
        ("time", duration(training.seconds)),
        ("speed", f"{short(training.tokens / training.seconds)} tokens/s"),
        ("energy", f"{plain(training.kilowatt_hours)} kWh"),
    ]
    rate = {"mfu": machine.mfu, "peak": machine.peak / 1e12, "basis": machine.basis}
    remark = TEXTS["training"].format(**rate, watts=machine.device.watts, pue=PUE)
    title = f"{machine.gpus:,} × {machine.device.title}" if machine.gpus > 1 else machine.device.title
    return Table(("training", machine.precision), rows, title, [remark], text=(0, 1))


def layouts_table(search: LayoutSearch) -> Table:
    """Return the best layouts, and the best of each other kind with the reason against it."""
    job, best = search.job, search.best
    top: list[LayoutPrediction] = []
    for layout in search.fitting:
        if len(top) < MAX_BEST and all(layout.choice.layout != other.choice.layout for other in top):
            top.append(layout)
    fastest = search.free or best
    shown = [(layout, why_not(layout, fastest) if layout is not fastest else "fastest that fits") for layout in top]
    if not top:
        shown.append((best, why_not(best, fastest)))
    if search.free is not None and search.free.choice.layout != best.choice.layout:
        shown.append((search.free, "fastest of all" if search.free.fits else why_not(search.free, search.free)))
    shown += [(layout, why_not(layout, fastest)) for layout in search.others() if layout not in top]
    axes = [axis for axis in AXES if any(layout.choice.layout.sizes[axis] > 1 for layout, _ in shown)]
    net = job.net
    remarks = [
        f"{job.device.title}: {net.inside / 1e9:.4g} GB/s each way inside a machine of {net.machine:,}"
        + (f", {net.across / 1e9:.4g} GB/s per GPU between machines ({net.name})." if job.gpus > net.machine else "."),
        TEXTS["layouts"],
    ]
    header = (*axes, "rows", "recompute", "memory", "compute", "waits", "bubble", "step", "MFU", "")
    title = f"{job.rows:,} × {job.length:,} tokens per step over {job.gpus:,} GPUs"
    spare = [header.index(name) for name in ("compute", "waits", "bubble", "MFU", "recompute")]
    rows = [_row(layout, axes, reason) for layout, reason in shown]
    return Table(header, rows, title, remarks, text=(len(header) - 1,), spare=spare)


def _row(layout: LayoutPrediction, axes: Sequence[str], reason: str) -> tuple[str, ...]:
    time, choice = layout.time, layout.choice
    sizes = {axis: str(size) if size > 1 else "" for axis, size in choice.layout.sizes.items()}
    sizes["tensor"] += " seq" if choice.layout.sequence else ""
    waits = time.tensor + time.context + time.send + time.shard + time.replicate
    return (
        *(sizes[axis] for axis in axes),
        str(choice.micro),
        "yes" if choice.recompute else "",
        byte_size(layout.memory.peak),
        _seconds(time.compute + time.update),
        _seconds(waits) if waits else "",
        f"{time.bubble / time.total:.0%}" if time.bubble else "",
        _seconds(time.total),
        f"{layout.mfu:.0%}",
        reason,
    )


def _seconds(seconds: float) -> str:
    return f"{plain(seconds)} s" if seconds >= 1 else f"{plain(1e3 * seconds)} ms"


PARTS = {"weights": "weights", "copies": "16-bit copies", "gradients": "gradients", "optimizer": "optimizer"}
PARTS |= {"activations": "activations", "logits": "logits", "passing": "temporary"}


def device_table(best: LayoutPrediction, machine: Machine) -> Table:
    """Return the memory of the fullest device under a layout, the sequences that fit, and the cost of generation."""
    job, memory = best.job, best.memory
    max_sequences = [_max_sequences(job, replace(best.choice, recompute=share)) for share in (0.0, 1.0)]
    remarks = [_capacity(job.device, job.length, max_sequences, min_devices=_min_devices(job))]
    if not memory.accumulates:
        remarks.append("Gradients appear as activations are freed; the peak has only one of them.")
    rows = [*_parts(memory), ("peak", byte_size(memory.peak))]
    title = _micro_batch(best.choice.micro, job.length, machine.gpus)
    title += ", with activation checkpointing" if best.choice.recompute else ""
    return Table(("memory", job.precision), rows, title, [*remarks, *_generation(job.model, job.cost, machine)])


def memory_table(model: Config, cost: Count, work: Workload, *, machine: Machine, adapter: LoRA | None = None) -> Table:
    """Return the memory of a model without a layout search, the sequences that fit, and the cost of generation."""
    memory = training_memory(model, work, adapter)
    single = training_memory(model, replace(work, sequences=1), adapter)
    free = machine.device.memory - single.fixed - single.logits
    left = free + single.fixed - single.recomputed
    min_devices = -(-single.fixed * machine.gpus // left) if left > 0 else None
    max_sequences = [free // single.activations, free // single.recomputed]
    remarks = [_capacity(machine.device, work.length, max_sequences, min_devices=min_devices)]
    remarks += _generation(model, cost, machine)
    recomputed = ("total, with activation checkpointing", byte_size(memory.total(recompute=True)))
    rows = [*_parts(memory), ("total", byte_size(memory.total())), recomputed]
    return Table(("memory", work.precision), rows, _micro_batch(work.sequences, work.length, machine.gpus), remarks)


def _parts(memory: Memory | RankMemory) -> list[tuple[str, str]]:
    sizes = {name: getattr(memory, key, 0) for key, name in PARTS.items()}
    return [(name, byte_size(size)) for name, size in sizes.items() if size]


def _micro_batch(sequences: int, length: int, gpus: int) -> str:
    return f"micro-batch of {sequences} × {length:,} tokens" + (f", on each of {gpus:,} devices" if gpus > 1 else "")


def _capacity(device: Device, length: int, max_sequences: Sequence[int], *, min_devices: int | None) -> str:
    """Say how many sequences fit, without and with recomputation, or how many devices could share one."""
    kept, recomputed = max_sequences
    if kept > 0:
        fits = f"enough for about {kept:,} sequences at a time, {recomputed:,} with activation checkpointing."
    elif recomputed > 0:
        fits = f"enough for about {recomputed:,} sequences at a time, with activation checkpointing."
    elif min_devices is not None:
        fits = f"too little for even one sequence; {min_devices:,} devices could share it (--gpus)."
    else:
        fits = f"too little for one sequence of {length:,} tokens."
    return f"{device.title} has {byte_size(device.memory)}: {fits}"


def _min_devices(job: TrainingJob) -> int | None:
    """Return the smallest power of two of devices that can shard the weights, with one recomputed sequence on each."""
    for gpus in (1 << power for power in range(1, MAX_DEVICES.bit_length())):
        choice = LayoutChoice(Layout(replicate=1, shard=gpus), 1, 1.0)
        if gpus > job.gpus and rank_memory(replace(job, rows=gpus), choice).peak <= job.device.memory:
            return gpus
    return None


def _max_sequences(job: TrainingJob, choice: LayoutChoice) -> int:
    batches = choice.batches(job.rows)

    def too_many(sequences: int) -> bool:
        larger = replace(job, rows=sequences * choice.layout.readers * batches)
        return rank_memory(larger, replace(choice, micro=sequences)).peak > job.device.memory

    return bisect_left(range(1, MAX_SEQUENCES + 1), True, key=too_many)


def _generation(model: Config, cost: Count, machine: Machine) -> list[str]:
    cache, weights = cache_bytes(model, machine.precision), 2 * (cost.multiplied + cost.active - cost.parameters)
    if not cache:
        return []
    small = f" ({byte_size(cache_bytes(model, 'int8'))} in int8)" if isinstance(model, Decoder) else ""
    sizes = {"cache": byte_size(cache), "total": byte_size(cache * cost.length), "weights": byte_size(weights)}
    rate = short(machine.device.bandwidth / weights)
    return [TEXTS["generation"].format(**sizes, small=small, length=cost.length, rate=rate)]
