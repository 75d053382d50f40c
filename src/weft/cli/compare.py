"""`weft compare`: several models on one text with the same compute."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import columns, options
from weft.cli.loading import loading
from weft.cli.terminal import echo


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
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE", help="The text: files, folders, builtin:python."),
    ] = None,
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
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side (default: as many as fit).")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where everything goes (default: one in comparisons/).")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train several models on one text, each with the same compute and its own best learning rate, and compare them.

    How many times the operations does one need for the loss of another? A page with curves, intervals and the answer is
    written to the folder, beside results.jsonl. The same command again continues what was interrupted.

      weft compare lstm transformer++ --data book.txt --flops 1e13

    `four-switches` in place of contenders goes from the Transformer of 2017 to LLaMA, switch by switch.
    """
    from weft.cli.live import live
    from weft.compare.config import experiment, tables_of
    from weft.errors import ConfigError

    named = [word for word in words or [] if "=" not in word.split(" ")[0] or _names(word)]
    settings = [word for word in words or [] if word not in named]
    if tokenizers is not None and not named:
        place = out or Path("comparisons") / "tokenizers"
        _compare_tokenizers(tokenizers.split(","), data or [], settings, place, quiet=False)
        return
    given = {"seeds": seeds, "rungs": rungs, "rates": rates, "baseline": baseline, "grid": grid, "sizes": sizes}
    budget = {"flops": flops, "tokens": tokens if tokens is None else round(tokens), "minutes": minutes}
    file = tables_of(named[0]) if len(named) == 1 else None
    if not named:
        raise ConfigError(
            "compare what? give two presets or recipes or more, for instance: weft compare lstm transformer"
        )
    tree = _tables(named, file, settings, data or [], vary or [])
    if tokenizers is not None:
        tree["contenders"] = _with_tokenizers(tree["contenders"], tokenizers.split(","))
    tree |= {key: value for key, value in given.items() if value is not None}
    if any(value is not None for value in budget.values()):
        tree["budget"] = {key: value for key, value in budget.items() if value is not None}
    wanted = experiment({"budget": {}, "data": {}, **tree}, named[0] if file else "")
    if len(wanted.contenders) < 2:
        raise ConfigError(f"{named[0]}: compared with what? name another contender, or vary a setting with --vary")
    folder = out or Path("comparisons") / _folder_name(named)
    with loading():
        from weft.compare.experiment import Workplace
        from weft.compare.experiment import compare as run
        from weft.compare.page import ComparisonPage
    command = shlex.join(["weft", *sys.argv[1:]])
    with live() as watch:
        found = run(wanted, Workplace(folder, jobs=jobs, watch=watch, command=command))
    page = ComparisonPage(found)
    page.save(folder / "compare.html")
    page.save_figures(folder / "figures")
    if tokenizers is not None:
        _compare_tokenizers(tokenizers.split(","), wanted.data.sources, [], folder, quiet=as_json)
    if as_json:
        columns.print_json({"result": page.result, "contenders": page.records()})
        return
    echo(page.text() or "")
    echo(f"\npage     {folder / 'compare.html'}")
    echo(f"numbers  {folder / 'results.jsonl'}")
    echo(f"models   {folder / 'runs'}")


def _compare_tokenizers(
    specs: Sequence[str], data: Sequence[str], settings: Sequence[str], folder: Path, quiet: bool
) -> None:
    """What tokenizers make of the held-out text, on a page and, unless it is to be quiet, in the terminal."""
    from weft.compare.tokenizers import compare_tokenizers
    from weft.config import validate
    from weft.data.config import Data, TextSource
    from weft.errors import ConfigError
    from weft.recipe.resolve import changed_tables

    tree = changed_tables(settings)
    read = validate(Data, {**tree.pop("data", {}), **({"sources": data} if data else {})})
    if tree:
        raise ConfigError(
            f"{next(iter(tree))}: a model's setting, and no model is named; weft compare MODEL --tokenizers"
        )
    if not read.sources:
        raise ConfigError("there is no text to compare on; give it with --data, for instance --data book.txt")
    found = compare_tokenizers(specs, TextSource(read.sources, read.validation, read.column, read.encoding))
    folder.mkdir(parents=True, exist_ok=True)
    page = found.save(folder / "tokenizers.html")
    if not quiet:
        echo(found.text() or "")
        echo(f"\npage     {page}\n")


def _with_tokenizers(contenders: dict[str, Any], specs: Sequence[str]) -> dict[str, Any]:
    """The one contender with each of the tokenizers."""
    from weft.compare.tokenizers import settings_of
    from weft.config import merge
    from weft.errors import ConfigError

    if len(contenders) != 1:
        raise ConfigError(f"--tokenizers: they are compared with one model, but {len(contenders)} are named")
    (base,) = contenders.values()
    return {
        spec.replace(":", "-").replace("/", "-"): {
            **base,
            "changes": merge(base["changes"], {"tokenizer": settings_of(spec)}),
        }
        for spec in specs
    }


def _names(word: str) -> bool:
    """Whether a word such as wide=transformer names a contender; a setting's value is no recipe."""
    from weft.models.presets import PRESETS
    from weft.recipe.resolve import recipe_names

    key, _, value = word.split(" ")[0].partition("=")
    return (
        "." not in key
        and key not in ("tokenizer", "model")
        and (value in PRESETS or value in recipe_names() or value.endswith(".toml"))
    )


def _tables(
    named: list[str], file: dict[str, Any] | None, settings: list[str], data: list[str], vary: list[str]
) -> dict[str, Any]:
    """What was asked for, as a comparison's file would have it."""
    from weft.compare.config import contender, varied
    from weft.config import merge
    from weft.errors import ConfigError
    from weft.recipe.resolve import changed_tables

    tree: dict[str, Any] = dict(file) if file is not None else {"contenders": {}}
    for words in () if file is not None else named:
        name, table = contender(words)
        if name in tree["contenders"]:
            raise ConfigError(f"{name}: named twice; give one of them another name, as in other={words}")
        tree["contenders"][name] = table
    above = changed_tables(settings)
    if data:
        above["data"] = merge(above.get("data", {}), {"sources": data})
    if "data" in above:  # the text is everybody's
        tree["data"] = merge(tree.get("data", {}), above.pop("data"))
    if above:
        tree["settings"] = merge(tree.get("settings", {}), above)
    if vary:
        tree["vary"] = dict(map(varied, vary))
    return tree


def _folder_name(named: list[str]) -> str:
    name = "-".join(Path(word.split(" ")[0]).name.removesuffix(".toml") for word in named)
    return "".join(sign if sign.isalnum() or sign in "._+-" else "-" for sign in name)[:80]
