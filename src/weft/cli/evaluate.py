"""`weft evaluate`: the metrics of a trained model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import columns, options
from weft.cli.loading import loading
from weft.cli.terminal import echo


def evaluate(
    context: typer.Context,
    run: options.Run,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE...", help="Text to evaluate on, instead of the held-out part."),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text files: the target of each line of --data."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows: each starts this many tokens after the last.")
    ] = None,
    encoding: Annotated[
        str, typer.Option(metavar="NAME", help="The encoding of the files of --data, such as cp1252.")
    ] = "utf-8",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the confusion matrix of a classifier, .svg, .png or .pdf.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="BITS", help="Also measure smaller weights, int8 or int4.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …"""
    with loading():
        import torch

        from weft.api.run import load
        from weft.decode.fast.quantize import check_bits
    from weft.data.rows import MissingColumnError
    from weft.errors import ConfigError, DataError

    more = context.args  # `--data *.txt` arrives as --data a.txt b.txt …
    if quantize is not None:
        check_bits(quantize)
    if figure is not None:
        from weft.explain.picture import FIGURES, check_picture

        check_picture(figure, FIGURES)
    if more and not data:
        raise ConfigError(f"'{more[0]}': text is given with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: it is that of the files of --data, which isn't given")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    loaded = load(run, dtype=torch.float32)  # as it learned, whatever it would write with
    objective = loaded.config.objective
    if targets and objective.reads != "rows":
        raise ConfigError(f"--targets {targets[0]}: this run is {objective.makes}, which is evaluated on text alone")
    if figure is not None and not hasattr(objective, "labels"):
        raise ConfigError(f"--figure {figure}: this run is {objective.makes}, which has no confusion matrix")
    if quantize is not None and not (objective.continues and objective.reads == "text"):
        raise ConfigError(f"--quantize {quantize}: evaluated for language models only")
    sources = [*(data or []), *more] or None
    try:
        metrics = loaded.evaluate(sources, targets or (), stride=stride, encoding=encoding)
    except MissingColumnError as error:
        raise DataError(f"{error.line}; this run reads '{error.column}', so rename the column") from None
    measured = {"": metrics}
    if quantize is not None:
        loaded.quantize(quantize)
        measured = {"as trained": metrics, quantize: loaded.evaluate(sources, stride=stride, encoding=encoding)}
    baseline = loaded.results().get(BASELINE) if sources is None else None  # known for the run's own text
    if baseline is not None:
        metrics[BASELINE] = baseline
    if figure is not None:
        from weft.explain.confusion import ConfusionMatrix

        ConfusionMatrix(tuple(map(tuple, metrics["matrix"])), tuple(metrics["labels"])).save(figure)
    if as_json:
        from weft.runs.lines import record

        smaller = {key: value for key, value in measured.get(quantize or "", {}).items() if isinstance(value, float)}
        echo(record(metrics if quantize is None else {**metrics, quantize: smaller}))
        return
    _show(measured)


BASELINE = "baseline_bits_per_byte"
UNITS = {
    "loss": "nats per token",
    "perplexity": "of the next token",
    "bits_per_byte": "of UTF-8 text; bytes that no token spells, such as unknown words, count 8 bits each",
    "unknown_share": "of all tokens",
    BASELINE: "bits per byte of character frequencies alone",
}


def _show(measured: dict[str, dict[str, Any]]) -> None:
    """The metrics, with what a second column costs, and the confusion matrix where there is one."""
    from weft.recipe.metrics import metric

    first, last = next(iter(measured.values())), list(measured.values())[-1]
    several, text = len(measured) > 1, "bits_per_byte" in first
    rows = []
    for key, value in first.items():
        if isinstance(value, float):
            shown = ".4%" if metric(key).format.endswith("%") else ".4f"
            cells = [format(metrics[key], shown) for metrics in measured.values() if key in metrics]
            cost = [f"{last[key] / value - 1:+.2%}"] if several and key in last and value else []
            title = "baseline" if key == BASELINE else metric(key).title  # what it is stands beside the value
            rows.append([title, *cells, *cost, UNITS.get(key, "") if text else ""])
        elif isinstance(value, str):
            rows.append([key.replace("_", " "), value, ""])
    if text:
        rows.append(["tokens", f"{first['tokens']:,}", f"each scored once; {first['bytes']:,} bytes"])
    names = ["", *measured, *(["cost"] if several else []), ""]
    filled = [[*row[:-1], *[""] * (len(names) - len(row)), row[-1]] for row in rows]
    columns.show(names, filled, text=(0, len(names) - 1))
    if "matrix" in first:
        echo()
        counts = [
            (label, *(f"{n:,}" for n in row)) for label, row in zip(first["labels"], first["matrix"], strict=True)
        ]
        columns.show(("actual ↓  predicted →", *first["labels"]), counts)
