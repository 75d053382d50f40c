"""`weft compare`: train several models on one text with equal budgets, and compare them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.console import options
from weft.cli.console.live import live, show
from weft.cli.console.options import command_line, option, recipe_argument
from weft.cli.console.terminal import echo, loading, print_json
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.compare.tokenizers import TokenizerComparison
    from weft.data.config import TextSource


def compare(
    context: typer.Context,
    words: list[str] | None = recipe_argument(
        "CONTENDER... KEY=VALUE",
        "Presets, recipes and .toml files, in quotes with changes: 'lstm model.layers=2'; then changes to all of them.",
        None,
        autocompletion=options.complete_contenders,
    ),
    data: options.Text = None,
    flops: float | None = option(
        None, "Budget of each: training FLOPs, such as 1e13; several are the points of the curves.", value="N..."
    ),
    tokens: float | None = option(None, "Budget of each: training tokens."),
    minutes: float | None = option(None, "Budget of each: minutes of training, whatever its FLOPs."),
    seeds: int | None = option(None, "Runs of each contender at every point (default: 3)."),
    rungs: int | None = option(None, "Points per curve: the budget, a third of it, a ninth … (default: 4)."),
    rates: int | None = option(None, "Learning rates to try; 1: only the recipe's (default: 5)."),
    baseline: str | None = option(None, "Compare the others with this one (default: the first).", value="NAME"),
    vary: list[str] | None = option(None, "Ablation: values of a setting. May be repeated.", value="KEY=A,B"),
    grid: str | None = option(None, "Ablation: all combinations, or one at a time (default: full).", value="full|one"),
    sizes: str | None = option(
        None, "As given, chosen for the budget, or the best of three (default: fixed).", value="fixed|budget|best"
    ),
    tokenizers: str | None = option(None, "Compare tokenizers: word,byte,bpe:8000 …", value="KIND,KIND:SIZE"),
    pairs: str | None = option(None, "Judge minimal pairs with each model of `century` or `grammar`.", value="PATH"),
    jobs: options.Jobs = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Train several models on one text, each with the same budget and its own best learning rate, and compare them.

    A page shows which model predicts the text best, and by which factor the others need more FLOPs for the same loss,
    with curves and intervals; the numbers are in results.jsonl. After an interruption, repeat the command to resume.

    $ weft compare lstm transformer++ --data book.txt --flops 1e13

    Instead of contenders, `efficiency` compares the Transformer of 2017 with LLaMA, which takes three minutes on two
    cores; `four-switches` goes from one to the other, switch by switch; `minutes` goes from AdamW to the recipe
    `python-docs`; `tricks` tries other changes to that recipe, one at a time; and `epochs` compares weight decay
    with dropout when a text is read many times. `century` goes from counted letters to LLaMA, in the order of the
    years: every model has four budgets, and the best of its sizes for each. `grammar` compares a 5-gram, an LSTM and
    a decoder on pairs of sentences of which one is ungrammatical.
    """
    from weft.compare.config import ComparisonRequest

    settings = {"seeds": seeds, "rungs": rungs, "rates": rates, "baseline": baseline, "grid": grid, "sizes": sizes}
    budget = {"flops": flops, "tokens": tokens, "minutes": minutes}
    kinds = [] if tokenizers is None else tokenizers.split(",")
    request = ComparisonRequest(words or [], data or [], vary or [], tokenizers=kinds, options=settings, budget=budget)
    if request.tokenizers and not request.contenders:
        folder = out or Path("comparisons") / "tokenizers"
        result = _compare_tokenizers(request.tokenizers, request.text(), folder, quiet=as_json)
        if as_json:
            print_json(result.record())
        return
    comparison = request.comparison()
    in_time = any(each.year is not None for each in comparison.contenders.values())
    if pairs is not None and not in_time:
        raise ConfigError(
            f"--pairs {pairs}: only for a comparison in the order of time, such as century or grammar; leave it out"
        )
    folder = out or Path("comparisons") / request.folder
    with loading():
        from weft.compare.century import CenturyPage, measure_knowledge
        from weft.compare.experiment import compare as run
        from weft.compare.page import ComparisonPage
        from weft.compare.pools import parse_jobs
        from weft.evaluate.minimal_pairs import read_pairs
    judged = [] if pairs is None else read_pairs(pairs)
    with live() as watch:
        command = command_line(context)
        results = run(comparison, folder, jobs=parse_jobs(jobs), watch=watch, command=command)
    page = ComparisonPage(results)
    if in_time:
        page = CenturyPage(results, knowledge=measure_knowledge(results, folder, judged))
    if request.tokenizers:
        text = comparison.data.text(comparison.data.parts[0])
        _compare_tokenizers(request.tokenizers, text, folder, quiet=as_json)
    paths = {"page": folder / "compare.html", "numbers": folder / "results.jsonl", "models": folder / "runs"}
    show(page, paths, as_json)


def _compare_tokenizers(
    specs: Sequence[str], text: "TextSource", folder: Path, *, quiet: bool
) -> "TokenizerComparison":
    """Compare tokenizers on the held-out text; save the page, and unless `quiet` print the result."""
    from weft.compare.tokenizers import compare_tokenizers
    from weft.storage.files import check_writable

    page = folder / "tokenizers.html"
    check_writable(page)
    result = compare_tokenizers(specs, text)
    result.save(page)
    if not quiet:
        echo(result.text())
        echo(f"\npage     {page}\n")
    return result
