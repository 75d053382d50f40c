"""`weft plan`: what a model and its training will cost, before anything runs."""

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.explain.count import Count
    from weft.explain.devices import Machine
    from weft.explain.memory import Memory, Workload
    from weft.explain.plan import TrainingPlan


class Lecture(StrEnum):
    """Tables of the lectures that can be set beside weft's own count."""

    gpt3 = "gpt3"
    opt = "opt"


class Precision(StrEnum):
    """Number formats of training."""

    bf16 = "bf16"
    tf32 = "tf32"
    fp32 = "fp32"


def plan(
    source: Annotated[
        str | None, typer.Argument(metavar="PRESET|RECIPE|RUN", help="A preset, a recipe or a run's folder.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as model.layers=8.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="b200 h200 h100 a100 a10 v100 l40s l4 rtx4090 rtx3090 mi300x cpu")
    ] = "h100",
    gpus: Annotated[int, typer.Option(min=1, help="How many; weights, gradients and moments are split.")] = 1,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens to train on: 300B, 1.5T, 3e11.", show_default="the recipe's steps, or 20 a parameter"
        ),
    ] = None,
    mfu: Annotated[float, typer.Option(help="The share of the device's peak that training reaches.")] = 0.4,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences a step.", show_default="the recipe's, or 32 a GPU")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a sequence.", show_default="the recipe's, or the context")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Number format of products.", show_default="the recipe's, or bf16")
    ] = None,
    lecture: Annotated[Lecture | None, typer.Option(help="Show a table of the lectures beside weft's count.")] = None,
) -> None:
    """Count parameters, operations, memory, time and energy from the settings alone."""
    from weft.errors import ConfigError

    if lecture is not None:
        if source is not None:
            raise ConfigError(f"--lecture {lecture} shows a fixed table; '{source}' has no place beside it")
        if (device, gpus, mfu) != ("h100", 1, 0.4) or tokens or batch or length or precision:
            raise ConfigError(f"--lecture {lecture} shows a fixed table, which no other option changes; leave them out")
        (_gpt3 if lecture is Lecture.gpt3 else _opt)()
        return
    if source is None:
        raise ConfigError("what is to be planned? name a preset, a recipe or a run, for instance: weft plan gpt2")

    from weft.explain.count import count
    from weft.explain.devices import Machine, device_named
    from weft.explain.memory import Workload, cache_bytes, training_memory
    from weft.explain.plan import TOKENS_PER_PARAMETER, plan_training
    from weft.explain.units import parse_count
    from weft.recipe.resolve import resolve

    recipe = resolve(source, changes or [])
    context: int = getattr(recipe.model, "context", 256)
    time = length or recipe.batch.length or context
    sides = 2 if recipe.objective.kind == "pairs" else 1
    fitting = None if recipe.batch.tokens is None else max(1, recipe.batch.tokens // (sides * time))
    size = batch or recipe.batch.size or fitting or 32 * gpus
    machine = Machine(device_named(device), gpus, mfu, str(precision or recipe.precision or "bf16"))
    cost = count(recipe.model, time, recipe.adapter)
    if tokens is not None:
        total, why = parse_count(tokens, "--tokens"), "as asked"
    elif recipe.steps is not None:
        total, why = recipe.steps * size * time, "the recipe's steps"
    else:
        total = max(TOKENS_PER_PARAMETER * cost.parameters, size * time)
        why = f"{TOKENS_PER_PARAMETER} a parameter, Hoffmann et al. 2022"
    training = plan_training(cost.training(), total, size * time, machine)
    _components(recipe.name, cost)
    if cost.parameters:
        micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else size
        work = Workload(min(micro, -(-size // gpus)), time, machine.precision, recipe.optimizer.kind, gpus)
        kept = training_memory(recipe.model, work, recipe.adapter)
        each = training_memory(recipe.model, replace(work, sequences=1), recipe.adapter)
        _memory(kept, each, machine, work, cache_bytes(recipe.model, machine.precision))
        _training(training, why, machine, f"{size:,} × {time:,}")


# ---- one model


def _components(name: str, cost: "Count") -> None:
    from weft.cli import columns
    from weft.explain.units import short

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
    columns.show(("part", "parameters", "share", "FLOPs/token", "share"), rows, title=name)
    if cost.note:
        columns.remark(cost.note)
    if cost.trainable < cost.parameters:
        columns.remark(
            f"{cost.trainable:,} of these learn, {cost.trainable / cost.parameters:.2%}; the rest stays as it is."
            f" Training takes {short(cost.training())} FLOPs a token."
        )
    elif cost.parameters:
        columns.remark(
            f"FLOPs are those of the forward pass at {cost.length:,} tokens a sequence. Training takes 3 times as many,"
            f" {short(cost.training())} a token, and {short(cost.training(recompute=True))} if layers are run again."
            " An m×k by k×n product is 2mkn; attention counts every key of the sequence, also under a causal mask."
        )


def _memory(kept: "Memory", each: "Memory", machine: "Machine", work: "Workload", cache: int) -> None:
    from weft.cli import columns
    from weft.explain.units import byte_size, short

    device, gpus, length = machine.device, machine.gpus, work.length
    apiece = f", on each of {gpus} devices" if gpus > 1 else ""
    rows = [
        ("weights", byte_size(kept.weights)),
        ("16-bit copies", byte_size(kept.copies)),
        ("gradients", byte_size(kept.gradients)),
        ("optimizer", byte_size(kept.optimizer)),
        ("activations", byte_size(kept.activations)),
        ("logits", byte_size(kept.logits)),
        ("all", byte_size(kept.total())),
        ("all, layers run again", byte_size(kept.total(recompute=True))),
    ]
    typer.echo()
    columns.show(("memory", work.precision), rows, title=f"{work.sequences} × {length:,} tokens at a time{apiece}")
    room = device.memory - each.fixed - each.logits
    has = f"{device.title} has {byte_size(device.memory)}"
    if room >= each.activations:
        columns.remark(
            f"{has}: room for about {room // each.activations:,} sequences at a time,"
            f" {room // each.recomputed:,} if layers are run again."
        )
    elif room >= each.recomputed:
        columns.remark(f"{has}: room for about {room // each.recomputed:,} sequences, if layers are run again.")
    elif (left := device.memory - each.logits - each.recomputed) > 0:
        columns.remark(
            f"{has}: too little even for one sequence at a time."
            f" {-(-each.fixed * gpus // left):,} of them could hold it between them (--gpus)."
        )
    else:
        columns.remark(f"{has}: too little for one sequence of {length:,} tokens.")
    if cache:
        halves = kept.weights * gpus // 2
        fastest = short(device.bandwidth / halves)
        columns.remark(
            f"Generating remembers {byte_size(cache)} a token, {byte_size(cache * length)} for {length:,}."
            f" Each token reads {byte_size(halves)} of 16-bit weights, so one sequence gets at most {fastest} tokens/s."
        )


def _training(training: "TrainingPlan", why: str, machine: "Machine", batch: str) -> None:
    from weft.cli import columns
    from weft.explain.plan import PUE
    from weft.explain.units import duration, plain, short

    device = machine.device
    many = f"{machine.gpus:,} × " if machine.gpus > 1 else ""
    rows = [
        ("tokens", f"{short(training.tokens)} ({why})"),
        ("steps", f"{training.steps:,} of {batch} tokens"),
        ("compute", f"{training.flops:.3g} FLOPs, {plain(training.petaflop_days)} petaflop/s-days"),
        ("time", duration(training.seconds)),
        ("speed", f"{short(training.tokens / training.seconds)} tokens/s"),
        ("energy", f"{plain(training.kilowatt_hours)} kWh"),
    ]
    typer.echo()
    columns.show(("training", machine.precision), rows, text=(0, 1), title=f"{many}{device.title}")
    columns.remark(
        f"At {machine.mfu:.0%} of the peak of {machine.peak / 1e12:,.4g} TFLOP/s (--mfu);"
        f" {device.watts:g} W a device, times {PUE} for the building (PUE)."
    )


# ---- tables of the lectures


def _gpt3() -> None:
    from weft.cli import columns
    from weft.explain.plan import PETAFLOP_DAY
    from weft.explain.size_tables import GPT3, gpt3_built
    from weft.explain.units import plain, short
    from weft.models.presets import PRESETS

    rows = []
    for row in GPT3:
        model, cost = gpt3_built(row)
        rows.append(
            (
                row.preset,
                short(row.parameters),
                short(cost.parameters),
                f"{cost.parameters / row.parameters - 1:+.1%}",
                str(model.layers),
                str(model.d_model),
                str(model.attention.heads),
                str(model.d_head),
                plain(cost.training() * 300e9 / PETAFLOP_DAY),
            )
        )
    columns.show(
        ("preset", "slide", "weft", "differs", "layers", "d_model", "heads", "d_head", "PF/s-days"),
        rows,
        title="GPT-3's sizes (Brown et al. 2020, table 2.1)",
    )
    columns.remark("Petaflop/s-days are those of training on 300 billion tokens.")
    for row in GPT3:
        if not row.multiplies_out:
            columns.remark(f"{row.preset}: {PRESETS[row.preset][1]}.")


def _opt() -> None:
    from weft.cli import columns
    from weft.explain.size_tables import OPT, OPT_CONTEXT, OPT_VOCABULARY, opt_shares

    parts = ("MHA projections", "FFN", "attention", "logits")
    rows = []
    for row in OPT:
        ours = opt_shares(row)
        slide = (row.projections, row.feedforward, row.attention, row.logits)
        both = [f"{ours[part]:.1f} | {there:4.1f}" for part, there in zip(parts, slide, strict=True)]
        rows.append((row.name, *both))
    columns.show(("size", *parts), rows, title="Percent of an update's FLOPs for OPT's sizes: weft | slide")
    columns.remark(
        f"weft counts 8d²L, 16d²L, 4TdL and 2dV a token (T = {OPT_CONTEXT}, V = {OPT_VOCABULARY}); an update runs the"
        " layers 4 times, because they are recomputed once, and the logits 3 times. The slide's FFN, attention and"
        " logits stand in the same ratios to each other. Its MHA column follows from no standard count, and moves the"
        " other three. Both show that the FFN's share rises with size and those of attention and logits fall."
    )
