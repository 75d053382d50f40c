"""What a training run takes on a named machine: memory, steps, hours, energy and compute, before a token is read."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.config import Config
from weft.costs.count import Count
from weft.costs.devices import Device
from weft.costs.memory import Memory, Workload, cache_bytes, training_memory
from weft.costs.units import byte_size, duration, plain, short
from weft.errors import ConfigError
from weft.figures.tables import Table
from weft.nn.config import LoRA

PETAFLOP_DAY = 8.64e19  # 10¹⁵ operations a second for a day (Brown et al. 2020)
PUE = 1.1  # what a large data centre draws for each watt that reaches its machines
ROWS = 32  # a device reads in a step, where nobody says
STEP_TOKENS = 1 << 22  # that a step reads at most, unless there are more devices: about what GPT-3 read
TOKENS_PER_PARAMETER = 20  # about where compute is best spent (Hoffmann et al. 2022)


@dataclass(frozen=True)
class Machine:
    """What training runs on, and the share of the peak that it reaches (MFU; Chowdhery et al. 2022, appendix B).

    `basis` says where that share comes from.
    """

    device: Device
    gpus: int
    mfu: float
    precision: str
    basis: str = "assumed; --mfu changes it"

    def __post_init__(self) -> None:
        if not 0.0 < self.mfu <= 1.0:
            raise ConfigError(f"--mfu {self.mfu:g}: expected a share of the peak above 0 and at most 1, such as 0.4")

    @property
    def peak(self) -> float:
        """Operations a second that all devices could do."""
        return self.gpus * self.device.peak(self.precision)


def default_rows(gpus: int, length: int) -> int:
    """Sequences a step where nobody says how many."""
    return max(gpus, min(ROWS * gpus, STEP_TOKENS // length // gpus * gpus))


@dataclass(frozen=True)
class TrainingPlan:
    """A whole training run."""

    tokens: int
    steps: int
    flops: float
    seconds: float
    kilowatt_hours: float


def plan_training(flops_per_token: float, tokens: int, tokens_per_step: int, machine: Machine) -> TrainingPlan:
    """A run over `tokens`.

    MFU counts the operations of the model alone, so recomputed layers are no part of `flops_per_token`.
    """
    flops = flops_per_token * tokens
    seconds = flops / (machine.peak * machine.mfu)
    energy = machine.gpus * machine.device.watts * PUE * seconds / 3.6e6
    return TrainingPlan(tokens, -(-tokens // tokens_per_step), flops, seconds, energy)


def record(name: str, cost: Count, memory: Memory, training: TrainingPlan, machine: Machine) -> dict[str, Any]:
    """A plan as plain values, for programs: numbers of bytes, operations and seconds."""
    return {
        "name": name,
        "parameters": cost.parameters,
        "trained_parameters": cost.trainable,
        "components": [
            {"name": part.name, "parameters": part.parameters, "flops_per_token": part.flops / cost.length}
            for part in cost.components
        ],
        "flops_per_token": {
            "forward": cost.forward,
            "training": cost.training(),
            "training_with_activation_checkpointing": cost.training(recompute=True),
        },
        "memory_bytes": {
            **asdict(memory),
            "total": memory.total(),
            "total_with_activation_checkpointing": memory.total(recompute=True),
        },
        "training": asdict(training),
        "device": {"title": machine.device.title, "count": machine.gpus, "mfu": machine.mfu},
        "precision": machine.precision,
    }


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
            f" {short(cost.training())} a token, and {short(cost.training(recompute=True))} with activation"
            " checkpointing."
            " An m×k by k×n product is 2mkn; attention counts every key of the sequence, also under a causal mask."
        )
    return Table(("part", "parameters", "share", "FLOPs/token", "share"), rows, name, remarks)


def memory_table(model: Config, work: Workload, machine: Machine, adapter: LoRA | None = None) -> Table:
    """What one device holds during training, how much fits on it, and what generation takes."""
    kept = training_memory(model, work, adapter)
    each = training_memory(model, replace(work, sequences=1), adapter)
    device, gpus, length = machine.device, machine.gpus, work.length
    sizes = {
        "weights": kept.weights,
        "16-bit copies": kept.copies,
        "gradients": kept.gradients,
        "optimizer": kept.optimizer,
        "activations": kept.activations,
        "logits": kept.logits,
        "all": kept.total(),
        "all, with activation checkpointing": kept.total(recompute=True),
    }
    free = device.memory - each.fixed - each.logits
    if free >= each.activations:
        fits = (
            f"enough for about {free // each.activations:,} sequences at a time,"
            f" {free // each.recomputed:,} with activation checkpointing."
        )
    elif free >= each.recomputed:
        fits = f"enough for about {free // each.recomputed:,} sequences at a time, with activation checkpointing."
    elif (left := device.memory - each.logits - each.recomputed) > 0:
        fits = f"too little for even one sequence at a time; {-(-each.fixed * gpus // left):,} could share it (--gpus)."
    else:
        fits = f"too little for one sequence of {length:,} tokens."
    remarks = [f"{device.title} has {byte_size(device.memory)}: {fits}"]
    if cache := cache_bytes(model, machine.precision):
        halves = kept.weights * gpus // 2
        remarks.append(
            f"Generation caches {byte_size(cache)} a token, {byte_size(cache * length)} for {length:,}."
            f" Each token reads {byte_size(halves)} of 16-bit weights,"
            f" so one sequence gets at most {short(device.bandwidth / halves)} tokens/s."
        )
    apiece = f", on each of {gpus} devices" if gpus > 1 else ""
    title = f"{work.sequences} × {length:,} tokens at a time{apiece}"
    rows = [(name, byte_size(size)) for name, size in sizes.items()]
    return Table(("memory", work.precision), rows, title, remarks)


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
