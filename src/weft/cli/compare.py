"""`weft compare`: several models on one text with the same compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import columns, options
from weft.cli.console.live import show, workplace
from weft.cli.console.loading import loading
from weft.cli.console.terminal import echo

if TYPE_CHECKING:
    from weft.compare.tokenizers import TokenizerComparison
    from weft.data.config import TextSource


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONTENDER... KEY=VALUE",
            help="Presets, recipes and .toml files, 'transformer model.layers=2' in quotes; changes to all of them.",
            autocompletion=options.complete_recipes,
            show_default=False,
        ),
    ] = None,
    data: options.Text = None,
    flops: Annotated[
        float | None, typer.Option(help="The budget of each: operations of training, such as 1e13.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="The budget of each: tokens that are read.")] = None,
    minutes: Annotated[float | None, typer.Option(help="The budget of each: minutes of training.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each at every point (default: 3).")] = None,
    rungs: Annotated[
        int | None, typer.Option(help="Points of each curve: the budget, a third of it, a ninth … (default: 4).")
    ] = None,
    rates: Annotated[
        int | None, typer.Option(help="Learning rates that are tried; 1: the recipe's own (default: 5).")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whom the others are measured against (default: the first).")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="An ablation: values of a setting of the one contender. May be repeated."),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="full|one", help="All combinations, or one change at a time (default: full).")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="fixed|budget", help="Sizes as given, or chosen for the budget (default: fixed)."),
    ] = None,
    tokenizers: Annotated[
        str | None,
        typer.Option(metavar="KIND,KIND:SIZE", help="Compare tokenizers: word, char, byte, bpe:8000, unigram:8000 …"),
    ] = None,
    jobs: options.Jobs = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Train several models on one text, each with the same compute and its own best learning rate, and compare them.

    How many times the operations does one need for the loss of another? A page with curves, intervals and the answer is
    written to the folder, beside results.jsonl. The same command again continues what was interrupted.

      weft compare lstm transformer++ --data book.txt --flops 1e13

    `four-switches` in place of contenders goes from the Transformer of 2017 to LLaMA, switch by switch.
    """
    from weft.compare.config import Asked

    asked = Asked(
        words or [],
        data or [],
        vary or [],
        [] if tokenizers is None else tokenizers.split(","),
        {"seeds": seeds, "rungs": rungs, "rates": rates, "baseline": baseline, "grid": grid, "sizes": sizes},
        {"flops": flops, "tokens": tokens, "minutes": minutes},
    )
    if asked.tokenizers and not asked.named:
        found = _tokenizers(asked.tokenizers, asked.text(), out or Path("comparisons") / "tokenizers", as_json)
        if as_json:
            columns.print_json(found.record())
        return
    wanted = asked.comparison()
    folder = out or Path("comparisons") / asked.folder
    with loading():
        from weft.compare.experiment import compare as run
        from weft.compare.page import ComparisonPage
    with workplace(folder, jobs) as place:
        page = ComparisonPage(run(wanted, place))
    if asked.tokenizers:
        _tokenizers(asked.tokenizers, wanted.data.text(wanted.data.parts[0]), folder, as_json)
    places = {"page": folder / "compare.html", "numbers": folder / "results.jsonl", "models": folder / "runs"}
    show(page, places, as_json)


def _tokenizers(specs: Sequence[str], text: "TextSource", folder: Path, quiet: bool) -> "TokenizerComparison":
    """What tokenizers make of the held-out text, on a page and, unless it is to be quiet, in the terminal."""
    from weft.compare.tokenizers import compare_tokenizers
    from weft.files import check_place

    page = folder / "tokenizers.html"
    check_place(page)
    found = compare_tokenizers(specs, text)
    found.save(page)
    if not quiet:
        echo(found.text())
        echo(f"\npage     {page}\n")
    return found
