"""`weft scale`: fit a scaling law to a family of models on one text."""

from pathlib import Path

import typer

from weft.cli.console import options
from weft.cli.console.live import live, show
from weft.cli.console.options import command_line, option, recipe_argument
from weft.cli.console.terminal import loading
from weft.errors import ConfigError


def scale(
    context: typer.Context,
    recipe: str = recipe_argument("PRESET|RECIPE", "The family: a preset or a recipe; its width and depth are varied."),
    changes: options.Changes = None,
    data: options.Text = None,
    flops: float | None = option(None, "FLOPs of the largest run, such as 1e13.", "--budget", "--flops"),
    sizes: int = option(5, "Number of model sizes, each twice the previous one."),
    rungs: int = option(4, "Training lengths per size, each three times the previous one."),
    rates: int = option(5, "Learning rates to try for each size; 1: only the recipe's."),
    seeds: int = option(1, "Runs of each configuration."),
    jobs: options.Jobs = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit how the loss of a family of models falls with its size and the training tokens, to plan larger runs.

    Models of several sizes are trained for several lengths, L(N, D) = E + A/N^α + B/D^β is fitted to them, and the size
    that the law predicts to be best for three times the budget is trained as a check. After an interruption, the same
    command resumes.

    $ weft scale llama-tiny --data book.txt --budget 1e13
    """
    from weft.compare.config import ComparisonRequest

    if flops is None:
        raise ConfigError("--budget is required: the FLOPs of the largest run, for instance --budget 1e13")
    settings = {"seeds": seeds, "rungs": rungs, "rates": rates}
    request = ComparisonRequest([recipe, *(changes or [])], data or [], options=settings, budget={"flops": flops})
    experiment = request.experiment()
    folder = out or Path("comparisons") / f"scale-{request.folder}"
    with loading():
        from weft.compare.pools import parse_jobs
        from weft.compare.scale import scale as run
    with live() as watch:
        command = command_line(context)
        page = run(experiment, folder, sizes=sizes, jobs=parse_jobs(jobs), watch=watch, command=command)
    show(page, {"page": folder / "scale.html", "numbers": folder / "ladder" / "results.jsonl"}, as_json)
