"""`weft plan`: what a model and its training will cost, before anything runs."""

from enum import StrEnum
from typing import Annotated

import typer

from weft.cli import columns, options
from weft.explain.devices import MFU

Lecture = StrEnum("Lecture", ["gpt3", "opt"])  # tables that can be shown beside weft's own count
Precision = StrEnum("Precision", ["bf16", "tf32", "fp32"])


def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|RECIPE|RUN",
            help="A preset, a recipe or a run's folder.",
            autocompletion=options.complete_recipes,
        ),
    ] = None,
    changes: options.Changes = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="b200, h200, h100, a100, a10, v100, l40s, l4, rtx4090, rtx3090, mi300x or cpu.",
        ),
    ] = "h100",
    gpus: Annotated[int, typer.Option(min=1, help="How many; weights, gradients and optimizer are split.")] = 1,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens to train on: 300B, 1.5T, 3e11 (default: the recipe's steps, or 20 per parameter).",
        ),
    ] = None,
    mfu: Annotated[float, typer.Option(help="The share of the device's peak that training reaches.")] = MFU,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step (default: the recipe's, or 32 per GPU).")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence (default: the recipe's, or the context).")
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(metavar="TYPE", help="Number format: bf16, tf32 or fp32 (default: the recipe's, or bf16)."),
    ] = None,
    lecture: Annotated[
        Lecture | None,
        typer.Option(metavar="NAME", help="Show a lecture's table, gpt3 or opt, beside weft's own count."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Count parameters, operations, memory, time and energy from the settings alone."""
    from weft.errors import ConfigError

    if lecture is not None:
        if source is not None:
            raise ConfigError(f"--lecture {lecture} shows a fixed table; leave out '{source}'")
        if (device, gpus, mfu) != ("h100", 1, MFU) or tokens or batch or length or precision or as_json:
            raise ConfigError(
                f"--lecture {lecture} shows a fixed table, which no other option changes; leave the others out"
            )
        from weft.explain.size_tables import gpt3_table, opt_table

        columns.show(*(gpt3_table() if lecture is Lecture.gpt3 else opt_table()))
        return
    if source is None:
        raise ConfigError("plan what? name a preset, a recipe or a run, for instance: weft plan gpt2")

    from weft.explain.count import count
    from weft.explain.devices import device_named
    from weft.explain.memory import Workload, training_memory
    from weft.explain.plan import TOKENS_PER_PARAMETER as RATIO
    from weft.explain.plan import Machine, components_table, memory_table, plan_training, record, training_table
    from weft.explain.units import parse_count
    from weft.recipe.resolve import resolve

    recipe = resolve(source, changes or [])
    context: int = getattr(recipe.model, "context", 256)
    time = length or recipe.batch.length or context
    sides = 2 if recipe.objective.has_source else 1
    fitting = None if recipe.batch.tokens is None else max(1, recipe.batch.tokens // (sides * time))
    size = batch or recipe.batch.size or fitting or 32 * gpus
    machine = Machine(device_named(device), gpus, mfu, str(precision or recipe.precision or "bf16"))
    cost = count(recipe.model, time, recipe.adapter)
    if tokens is not None:
        total, why = parse_count(tokens, "--tokens"), "as asked"
    elif recipe.steps is not None:
        total, why = recipe.steps * size * time, "the recipe's steps"
    else:
        total = max(RATIO * cost.parameters, size * time)
        why = f"{RATIO} per parameter, Hoffmann et al. 2022"
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else size
    work = Workload(min(micro, -(-size // gpus)), time, machine.precision, recipe.optimizer.kind, gpus)
    training = plan_training(cost.training(), total, size * time, machine)
    if as_json:
        memory = training_memory(recipe.model, work, recipe.adapter)
        columns.print_json(record(recipe.name, cost, memory, training, machine))
        return
    columns.show(*components_table(recipe.name, cost))
    if not cost.parameters:
        return
    typer.echo()
    columns.show(*memory_table(recipe.model, work, machine, recipe.adapter))
    typer.echo()
    columns.show(*training_table(training, machine, why, f"{size:,} × {time:,}"))
