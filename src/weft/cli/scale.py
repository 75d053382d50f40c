"""`weft scale`: a scaling law of one family of models on one text."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.live import command_line, live, show
from weft.cli.console.options import option, recipe_argument
from weft.cli.console.terminal import loading
from weft.errors import ConfigError


def scale(
    recipe: str = recipe_argument(
        "PRESET|RECIPE", "The family: a preset or a recipe, whose width and depth are varied."
    ),
    changes: options.Changes = None,
    data: options.Text = None,
    flops: float | None = option(None, "Operations of the ladder's largest run, such as 1e13.", "--budget", "--flops"),
    sizes: int = option(5, "Sizes of the ladder, each twice the one before."),
    rungs: int = option(4, "Lengths of training of each size, each three times the one before."),
    rates: int = option(5, "Learning rates that are tried for each size; 1: the recipe's own."),
    seeds: int = option(1, "Runs of each."),
    jobs: options.Jobs = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit how the loss of a family falls with its size and with the text it reads, and what to train next.

    Models of several sizes are trained for several lengths, L(N, D) = E + A/N^α + B/D^β is fitted to them, and the size
    that the law finds best for three times the budget is trained to check it. The same command again continues.

    $ weft scale llama-tiny --data book.txt --budget 1e13
    """
    from weft.compare.config import ComparisonRequest

    if flops is None:
        raise ConfigError("how large? give the operations of the ladder's largest run, for instance --budget 1e13")
    settings = {"seeds": seeds, "rungs": rungs, "rates": rates}
    asked = ComparisonRequest([recipe, *(changes or [])], data or [], options=settings, budget={"flops": flops})
    wanted = asked.experiment()
    folder = out or Path("comparisons") / f"scale-{asked.folder}"
    with loading():
        from weft.compare.pools import parse_jobs
        from weft.compare.scale import scale as run
    with live() as watch:
        page = run(wanted, folder, sizes=sizes, jobs=parse_jobs(jobs), watch=watch, command=command_line())
    show(page, {"page": folder / "scale.html", "numbers": folder / "ladder" / "results.jsonl"}, as_json)
