"""`weft scale`: a scaling law of one family of models on one text."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import columns, options
from weft.cli.loading import loading
from weft.cli.terminal import echo


def scale(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|RECIPE",
            help="The family: a preset or a recipe, whose width and depth are varied.",
            autocompletion=options.complete_recipes,
        ),
    ],
    changes: options.Changes = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE", help="The text: files, folders, builtin:python."),
    ] = None,
    flops: Annotated[
        float | None, typer.Option("--budget", "--flops", help="Operations of the ladder's largest run, such as 1e13.")
    ] = None,
    sizes: Annotated[int, typer.Option(help="Sizes of the ladder, each twice the one before.")] = 5,
    rungs: Annotated[int, typer.Option(help="Lengths of training of each size, each three times the one before.")] = 4,
    rates: Annotated[int, typer.Option(help="Learning rates that are tried for each size; 1: the recipe's own.")] = 5,
    seeds: Annotated[int, typer.Option(help="Runs of each.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side (default: as many as fit).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where everything goes (default: one in comparisons/).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit how the loss of a family falls with its size and with the text it reads, and what to train next.

    Models of several sizes are trained for several lengths, L(N, D) = E + A/N^α + B/D^β is fitted to them, and the size
    that the law finds best for three times the budget is trained to check it. The same command again continues.

      weft scale llama-tiny --data book.txt --budget 1e13
    """
    from weft.cli.live import live
    from weft.compare.config import experiment
    from weft.errors import ConfigError
    from weft.recipe.resolve import changed_tables

    if flops is None:
        raise ConfigError("how large? give the operations of the ladder's largest run, for instance --budget 1e13")
    above = changed_tables(changes or [])
    text = above.pop("data", {}) | ({"sources": data} if data else {})
    name = Path(recipe).name.removesuffix(".toml")
    wanted = experiment(
        {
            "contenders": {name: {"recipe": recipe}},
            "data": text,
            "budget": {"flops": flops},
            "settings": above,
            "seeds": seeds,
            "rungs": rungs,
            "rates": rates,
        }
    )
    with loading():
        from weft.compare.experiment import Workplace
        from weft.compare.scale import page_of
        from weft.compare.scale import scale as run
    folder = out or Path("comparisons") / f"scale-{name}"
    command = shlex.join(["weft", *sys.argv[1:]])
    with live() as watch:
        found = run(wanted, Workplace(folder, jobs=jobs, watch=watch, command=command), sizes)
    page = page_of(found)
    page.save(folder / "scale.html")
    page.save_figures(folder / "figures")
    if as_json:
        columns.print_json(page.record())
        return
    echo(page.text() or "")
    echo(f"\npage     {folder / 'scale.html'}")
    echo(f"numbers  {folder / 'ladder' / 'results.jsonl'}")
