"""`weft plan`: estimate the costs of a model and its training."""

from enum import StrEnum
from pathlib import Path

import typer

from weft.cli.console import options
from weft.cli.console.options import flag, option, recipe_argument
from weft.cli.console.terminal import echo, print_json, print_tables
from weft.errors import ConfigError

Lecture = StrEnum("Lecture", ["gpt3", "opt", "compute", "logbook"])  # tables of the lectures
Precision = StrEnum("Precision", ["bf16", "tf32", "fp32"])


def plan(
    context: typer.Context,
    source: str | None = recipe_argument("PRESET|RECIPE|RUN", "A preset, a recipe or a run's folder.", None),
    changes: options.Changes = None,
    device: str = option(
        "h100",
        "The device to train on: b200, h200, h100, a100, a10, v100, l40s, l4, rtx4090, rtx3090, mi300x or cpu.",
        value="NAME",
    ),
    gpus: int = option(1, "Number of devices; every layout over them is tried.", min=1),
    interconnect: str | None = option(
        None,
        "The network between machines of 8 GPUs: ib-edr, ib-hdr, ib-ndr, ib-xdr, roce-100, roce-200, roce-400,"
        " ethernet-10, ethernet-25 or ethernet-100 (one card per machine), or its bandwidth per GPU, such as 400Gb/s;"
        " nvlink or pcie if all GPUs are in one machine (default: the usual one for the device).",
        value="NAME",
    ),
    layout: str | None = option(
        None, "Plan only this layout: 'tensor=8,pipeline=16'; other GPUs hold replicas.", value="SIZES"
    ),
    tokens: str | None = option(
        None, "Training tokens, such as 300B (default: the recipe's, or 20 per parameter).", value="N"
    ),
    mfu: float | None = option(None, "Model FLOPs utilisation, a share of the peak (default: predicted)."),
    batch: int | None = option(None, "Sequences per step (default: the recipe's, or 32 per GPU).", min=1),
    length: int | None = option(None, "Tokens per sequence (default: the recipe's, or the context).", min=1),
    precision: Precision | None = option(None, "bf16, tf32 or fp32 (default: the recipe's, or bf16).", value="TYPE"),
    lecture: Lecture | None = option(
        None, "Show a table of the lectures: gpt3, opt, compute or logbook (of OPT's training).", value="NAME"
    ),
    out: Path | None = option(
        None, "With --lecture compute or logbook: draw it, as .html, .svg, .png or .pdf.", value="FILE"
    ),
    published: bool = flag("--published", "Show published and measured step times beside the predictions."),
    as_json: options.AsJson = False,
) -> None:
    """Estimate parameters, FLOPs, memory, time and energy from the settings alone, and choose a layout.

    $ weft plan gpt2 --gpus 8
    """
    if lecture is not None or published:
        shown = f"--lecture {lecture}" if lecture is not None else "--published"
        if source is not None:
            raise ConfigError(f"{shown} shows a fixed table; leave out '{source}'")
        others = (gpus > 1, interconnect, layout, tokens, mfu, batch, length, precision, as_json, lecture and published)
        if device != "h100" or any(others):
            raise ConfigError(f"{shown} shows a fixed table; leave out the other options")
        if lecture in (Lecture.compute, Lecture.logbook):
            _draw(lecture, out)
            return
        if out is not None:
            raise ConfigError(
                f"--out {out}: {shown} is only a table; --lecture compute and --lecture logbook are drawn"
            )
        from weft.costs.published import gpt3_tables, opt_table, published_table

        if lecture == Lecture.opt:
            print_tables(*opt_table())
        else:
            print_tables(*(gpt3_tables() if lecture else [published_table()]))
        return
    if out is not None:
        raise ConfigError(
            f"--out {out}: only with --lecture compute or logbook; for a model: weft explain PRESET --out"
        )
    if source is None:
        raise ConfigError("nothing to plan: name a preset, a recipe or a run, for instance: weft plan gpt2")

    from weft.api.plan import PlanSettings
    from weft.api.plan import plan as make_plan

    result = make_plan(source, changes or [], **{name: context.params[name] for name in PlanSettings.model_fields})
    if as_json:
        print_json(result.record())
    else:
        print_tables(*result.tables())


def _draw(lecture: Lecture, out: Path | None) -> None:
    """Show a figure of published numbers: as tables, or drawn into a file."""
    from weft.costs.history import opt_logbook, training_compute

    picture = training_compute() if lecture is Lecture.compute else opt_logbook()
    if out is None:
        print_tables(*picture.tables())
    else:
        echo(f"{picture.title}: {picture.save(out)}")
