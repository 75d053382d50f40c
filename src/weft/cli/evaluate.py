"""`weft evaluate`: how well a trained model predicts a text."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weft.evaluate.perplexity import Score


def evaluate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE...", help="Other text than the run's own held-out part."),
    ] = None,
    targets: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text files whose lines answer those of --data.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows: each starts so many tokens after the one before.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the confusion matrix of a classifier, .png or .svg.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="BITS", help="Also with smaller weights, int8 or int4: what they cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure loss, perplexity and bits per byte on the held-out part of the run's text, or on other text."""
    import torch

    from weft.api import train as api
    from weft.decode.fast.quantize import check_bits
    from weft.errors import ConfigError

    more = context.args  # `--data *.txt` arrives as --data a.txt b.txt …
    if quantize is not None:
        check_bits(quantize)
    if figure is not None:
        from weft.explain.figures import check_figure

        check_figure(figure)

    if more and not data:
        raise ConfigError(f"'{more[0]}': text is given with --data")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    loaded = api.load(run, dtype=torch.float32)  # as it learned, whatever it would write with
    goal = loaded.config.objective
    if targets and goal.reads != "rows":
        raise ConfigError(f"--targets {targets[0]}: a run that learned '{goal.kind}' is measured on text alone")
    if figure is not None and not hasattr(goal, "labels"):
        raise ConfigError(f"--figure {figure}: a run that learned '{goal.kind}' has no confusion matrix")
    if stride is not None and (goal.kind != "next-token" or loaded.config.model.kind == "ngram"):
        what = "an n-gram model" if loaded.config.model.kind == "ngram" else f"a run that learned '{goal.kind}'"
        raise ConfigError(f"--stride {stride}: {what} is not measured in windows of text")
    if goal.kind != "next-token":
        if quantize is not None:
            raise ConfigError(f"--quantize {quantize}: measured for language models alone")
        figures = loaded.figures([*(data or []), *more] or None, targets or [])
        if figure is not None:
            _draw(figures, figure)
        _show(figures, as_json)
        return
    sources = [*(data or []), *more] or None
    score = loaded.score(sources, stride=stride)
    smaller = None
    if quantize is not None:
        loaded.quantize(quantize)
        smaller = loaded.score(sources, stride=stride)
    figures = {**score.numbers(), "tokens": score.tokens, "bytes": score.bytes}
    mark = loaded.results().get(BASELINE) if sources is None else None  # known of the run's own text
    if mark is not None:
        figures[BASELINE] = mark
    if as_json:
        typer.echo(json.dumps(figures if smaller is None else {**figures, quantize: smaller.numbers()}))
        return
    _show_scores({"as trained": score} if smaller is None else {"as trained": score, str(quantize): smaller}, mark)


BASELINE = "baseline_bits_per_byte"


def _show_scores(scores: "dict[str, Score]", mark: float | None) -> None:
    """The figures of a language model, and the mark to beat; of two, what the second one costs."""
    from rich.console import Console
    from rich.table import Table

    first, last = next(iter(scores.values())), list(scores.values())[-1]
    several = len(scores) > 1
    table = Table(box=None, show_header=several, pad_edge=False, header_style="dim")
    table.add_column()
    for name in [*scores, "cost"] if several else scores:
        table.add_column(name, justify="right")
    table.add_column(style="dim")
    units = {"loss": "nats a token", "perplexity": "of the next token", "bits_per_byte": "of UTF-8 text"}
    for key, unit in units.items():
        places = 2 if key == "perplexity" else 4
        told = [f"{score.numbers()[key]:.{places}f}" for score in scores.values()]
        cost = [f"{last.numbers()[key] / first.numbers()[key] - 1:+.2%}"] if several else []
        table.add_row(key.replace("_", " "), *told, *cost, unit)
    blanks = [""] * len(scores) if several else []
    if mark is not None:
        table.add_row("", f"{mark:.4f}", *blanks, "bits per byte of character frequencies alone")
    table.add_row("tokens", f"{first.tokens:,}", *blanks, f"each scored once; {first.bytes:,} bytes")
    Console().print(table)


def _show(figures: dict[str, Any], as_json: bool) -> None:
    """The figures of a goal, and the confusion matrix where there is one."""
    if as_json:
        from weft.runs.folder import record

        typer.echo(record(figures))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for key, value in figures.items():
        if isinstance(value, float):
            table.add_row(key.replace("_", " "), f"{value:.4f}")
        elif isinstance(value, str):
            table.add_row(key.replace("_", " "), value)
    console.print(table)
    if "matrix" in figures:
        told = Table("true ↓  told →", *figures["labels"], box=None, pad_edge=False, header_style="bold")
        for label, row in zip(figures["labels"], figures["matrix"], strict=True):
            told.add_row(label, *(f"{count:,}" for count in row))
        console.print()
        console.print(told)


def _draw(figures: dict[str, Any], path: Path) -> None:
    from weft.explain.figures import confusion_matrix, save_figure

    save_figure(confusion_matrix(figures["matrix"], figures["labels"]), path)
