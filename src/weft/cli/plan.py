"""`weft plan`: what a model and its training will cost, before anything runs."""

from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from weft.cli import columns, options

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
    gpus: Annotated[int, typer.Option(min=1, help="How many; every layout over them is tried.")] = 1,
    interconnect: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What joins machines of 8 GPUs: ib-edr, ib-hdr, ib-ndr, ib-xdr, roce-100, roce-200, roce-400,"
            " ethernet-10, ethernet-25 or ethernet-100 (one card a machine), or a number for each GPU, such as 400Gb/s;"
            " nvlink or pcie: all GPUs in one machine (default: what the device usually comes with).",
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Plan this layout alone, such as 'tensor=8,sequence=true,pipeline=16'; the rest are copies.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens to train on: 300B, 1.5T, 3e11 (default: the recipe's steps, or 20 per parameter).",
        ),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(help="The share of the device's peak that training reaches, instead of what a step works out to."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per step (default: the recipe's, or 32 per GPU up to 4M tokens)."),
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
    published: Annotated[
        bool, typer.Option("--published", help="Show published and measured steps beside what is predicted.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Count parameters, operations, memory, time and energy from the settings alone, and choose a layout."""
    from weft.errors import ConfigError

    if lecture is not None or published:
        shown = f"--lecture {lecture}" if lecture is not None else "--published"
        if source is not None:
            raise ConfigError(f"{shown} shows a fixed table; leave out '{source}'")
        given = (gpus > 1, interconnect, layout, tokens, mfu, batch, length, precision, as_json, lecture and published)
        if device != "h100" or any(given):
            raise ConfigError(f"{shown} shows a fixed table, which no other option changes; leave the others out")
        from weft.costs.published import published_table
        from weft.costs.size_tables import gpt3_table, opt_table

        tables = {Lecture.gpt3: gpt3_table, Lecture.opt: opt_table, None: published_table}
        columns.show(tables[lecture]())
        return
    if source is None:
        raise ConfigError("plan what? name a preset, a recipe or a run, for instance: weft plan gpt2")

    from weft.costs.count import count
    from weft.costs.devices import MFU, device_named
    from weft.costs.interconnect import interconnect_named
    from weft.costs.layout_search import layout_from, search
    from weft.costs.layout_tables import device_table, layout_record, layouts_table
    from weft.costs.layouts import Job
    from weft.costs.memory import Workload, training_memory
    from weft.costs.plan import TOKENS_PER_PARAMETER as RATIO
    from weft.costs.plan import Machine, components_table, default_rows, memory_table, plan_training, record
    from weft.costs.plan import training_table as training_rows
    from weft.costs.units import parse_count
    from weft.models.config import TransformerConfig
    from weft.recipe.objective import MaskedObjective
    from weft.recipe.resolve import resolve

    recipe = resolve(source, changes or [])
    context: int = getattr(recipe.model, "context", 256)
    time = length or recipe.batch.length or context
    sides = 2 if recipe.objective.has_source else 1
    fitting = None if recipe.batch.tokens is None else max(1, recipe.batch.tokens // (sides * time))
    size = batch or recipe.batch.size or fitting or default_rows(gpus, time)
    number = str(precision or recipe.precision or "bf16")
    named, asked = device_named(device), None if layout is None else layout_from(layout)
    net = interconnect_named(interconnect, named, gpus)
    machine = Machine(named, gpus, MFU if mfu is None else mfu, number)
    cost = count(recipe.model, time, recipe.adapter)
    if tokens is not None:
        total, why = parse_count(tokens, "--tokens"), "as asked"
    elif recipe.steps is not None:
        total, why = recipe.steps * size * time, "the recipe's steps"
    else:
        total = max(RATIO * cost.parameters, size * time)
        why = f"{RATIO} per parameter, Hoffmann et al. 2022"
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else None
    found = None
    if isinstance(recipe.model, TransformerConfig) and recipe.model.divisible and recipe.adapter is None:
        job = Job(recipe.model, size, time, named, net, gpus, number, recipe.optimizer.kind)
        if isinstance(recipe.objective, MaskedObjective):
            job = replace(job, predicted=recipe.objective.rate)
        found = search(job, asked, micro, True if recipe.batch.recompute else None)
        if mfu is None:
            machine = replace(machine, mfu=found.best.mfu, basis="worked out from a step; --mfu overrides it")
        else:
            machine = replace(machine, basis=f"--mfu; a step works out to {found.best.mfu:.1%}")
    elif asked is not None:
        raise ConfigError(f"--layout: {'an adapter' if recipe.adapter else 'this model'} can't be planned over a mesh")
    work = Workload(min(micro or size, -(-size // gpus)), time, number, recipe.optimizer.kind, gpus)
    training = plan_training(cost.training(), total, size * time, machine)
    if as_json:
        memory = training_memory(recipe.model, work, recipe.adapter)
        values = record(recipe.name, cost, memory, training, machine)
        if found is not None:
            layouts = layout_record(found)
            values |= {"memory_bytes": layouts["best"]["memory_bytes"], "layouts": layouts}
        columns.print_json(values)
        return
    columns.show(components_table(recipe.name, cost))
    if not cost.parameters:
        return
    typer.echo()
    if found is None:
        columns.show(memory_table(recipe.model, work, machine, recipe.adapter))
    else:
        if gpus > 1:
            columns.show(layouts_table(found))
            typer.echo()
        columns.show(device_table(found.best))
    typer.echo()
    columns.show(training_rows(training, machine, why, f"{size:,} × {time:,}"))
