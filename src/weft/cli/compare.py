"""`weft compare`: several models on one text with the same compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import options
from weft.cli.console.live import show, workplace
from weft.cli.console.options import option, recipe_argument
from weft.cli.console.terminal import echo, loading, print_json

if TYPE_CHECKING:
    from weft.compare.tokenizers import TokenizerComparison
    from weft.data.config import TextSource


def compare(
    words: list[str] | None = recipe_argument(
        "CONTENDER... KEY=VALUE",
        "Presets, recipes and .toml files, 'transformer model.layers=2' in quotes; changes to all of them.",
        None,
        autocompletion=options.complete_contenders,
    ),
    data: options.Text = None,
    flops: float | None = option(None, "The budget of each: operations of training, such as 1e13."),
    tokens: float | None = option(None, "The budget of each: tokens that are read."),
    minutes: float | None = option(None, "The budget of each: minutes of training."),
    seeds: int | None = option(None, "Runs of each at every point (default: 3)."),
    rungs: int | None = option(None, "Points of each curve: the budget, a third of it, a ninth … (default: 4)."),
    rates: int | None = option(None, "Learning rates that are tried; 1: the recipe's own (default: 5)."),
    baseline: str | None = option(None, "Whom the others are measured against (default: the first).", value="NAME"),
    vary: list[str] | None = option(
        None, "An ablation: values of a setting of the one contender. May be repeated.", value="KEY=A,B"
    ),
    grid: str | None = option(None, "All combinations, or one change at a time (default: full).", value="full|one"),
    sizes: str | None = option(None, "Sizes as given or chosen for the budget (default: fixed).", value="fixed|budget"),
    tokenizers: str | None = option(
        None, "Compare tokenizers: word, char, byte, bpe:8000, unigram:8000 …", value="KIND,KIND:SIZE"
    ),
    jobs: options.Jobs = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Train several models on one text, each with the same compute and its own best learning rate, and compare them.

    How many times the operations does one need for the loss of another? A page with curves, intervals and the answer is
    written to the folder, beside results.jsonl. The same command again continues what was interrupted.

    $ weft compare lstm transformer++ --data book.txt --flops 1e13

    `four-switches` in place of contenders goes from the Transformer of 2017 to LLaMA, switch by switch; `minutes` goes
    from AdamW to the recipe of `weft quickstart`, `tricks` tries other changes to that, one at a time, and `epochs`
    weighs weight decay against dropout where a text is read many times.
    """
    from weft.compare.config import Asked

    settings = {"seeds": seeds, "rungs": rungs, "rates": rates, "baseline": baseline, "grid": grid, "sizes": sizes}
    budget = {"flops": flops, "tokens": tokens, "minutes": minutes}
    kinds = [] if tokenizers is None else tokenizers.split(",")
    asked = Asked(words or [], data or [], vary or [], kinds, settings, budget)
    if asked.tokenizers and not asked.named:
        found = _tokenizers(asked.tokenizers, asked.text(), out or Path("comparisons") / "tokenizers", as_json)
        if as_json:
            print_json(found.record())
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
    from weft.storage.files import check_writable

    page = folder / "tokenizers.html"
    check_writable(page)
    found = compare_tokenizers(specs, text)
    found.save(page)
    if not quiet:
        echo(found.text())
        echo(f"\npage     {page}\n")
    return found
