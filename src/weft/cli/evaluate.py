"""`weft evaluate`: the metrics of a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import columns, options
from weft.cli.loading import loading
from weft.cli.terminal import echo
from weft.cli.together import load_together, refuse_together, together

if TYPE_CHECKING:
    from weft.evaluate.details import Details
    from weft.evaluate.overlap import Overlap
    from weft.figures.tables import Table


@together
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
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Overlapping windows: each starts this many tokens after the last and scores what is new. Smaller is "
            "slower, and gives every token more context. A recurrent model that carries its state needs none.",
        ),
    ] = None,
    encoding: Annotated[
        str, typer.Option(metavar="NAME", help="The encoding of the files of --data, such as cp1252.")
    ] = "utf-8",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the confusion matrix of a classifier, .svg, .png or .pdf.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="BITS", help="Also measure smaller weights: bf16, int8, int4 or auto.")
    ] = None,
    details: Annotated[
        bool,
        typer.Option("--details", help="Also the loss by context and by frequency, and the most surprising passages."),
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="Also look for the text in the training text, by 13-grams of words. Short texts are compared anyway.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the details as a page, .html.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Evaluate on these tasks of lm-evaluation-harness instead."),
    ] = None,
    tasks_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with tasks of your own for --tasks (.yaml).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Take the first N examples of each task only.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …

    A language model reads a text in windows of the length that it was trained with; each token is scored once. Windows
    go over the borders of documents, unless it was trained with data.document_mask: then no document sees another, and
    the bytes of its first token, which nothing predicts, count 8 bits each. Intervals are those of a bootstrap over
    documents, and over equal pieces of a long one.
    """
    if tasks is not None or tasks_path is not None or limit is not None:
        from weft.cli.tasks import Asked, evaluate_on_tasks
        from weft.parallel.ranks import join

        refuse_together(join(), {"--tasks": tasks})  # its harness would ask, and print, in each of them
        others = {"--data": data, "--targets": targets, "--stride": stride, "--figure": figure, "--quantize": quantize}
        others |= {"--details": details or None, "--overlap": overlap or None, "--out": out}
        evaluate_on_tasks(run, Asked(tasks, tasks_path, limit, as_json), {**others, "": context.args})
        return
    with loading():
        import torch

        from weft.api.auto import check_width
        from weft.evaluate.overlap import QUICK_BYTES, overlap_tables
        from weft.parallel.ranks import join
    from weft.data.rows import MissingColumnError
    from weft.errors import ConfigError, DataError, RunError

    more = context.args  # `--data *.txt` arrives as --data a.txt b.txt …
    if quantize is not None:
        check_width(quantize)
    if figure is not None or out is not None:
        from weft.figures.picture import FIGURES, PAGE, check_picture

        for path, suffixes in ((figure, FIGURES), (out, (PAGE,))):
            if path is not None:
                check_picture(path, suffixes)
    if more and not data:
        raise ConfigError(f"'{more[0]}': text is given with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: it is that of the files of --data, which isn't given")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    sources = [*(data or []), *more] or None
    refuse_together(join(), {"--quantize": quantize, "--figure": figure, "--out": out})
    refuse_together(join(), {"--data": "-" in (sources or ()) and "-"})  # there is one standard input
    loaded = load_together(run, dtype=torch.float32)  # as it learned, whatever it would write with
    objective = loaded.config.objective
    if targets and objective.reads != "rows":
        raise ConfigError(f"--targets {targets[0]}: this run is {objective.makes}, which is evaluated on text alone")
    if figure is not None and not hasattr(objective, "labels"):
        raise ConfigError(f"--figure {figure}: this run is {objective.makes}, which has no confusion matrix")
    if quantize is not None and not (objective.continues and objective.reads == "text"):
        raise ConfigError(f"--quantize {quantize}: evaluated for language models only")
    asked = "--details" if details else "--overlap" if overlap else f"--out {out}" if out else None
    if asked is not None and not (objective.continues and objective.reads == "text"):
        raise ConfigError(f"{asked}: this run is {objective.makes}, and that is for language models")
    shared, found, unchecked = None, None, 0
    try:
        with loaded.evaluation(sources, targets or (), encoding) as text:
            if details or out is not None:
                found = text.details(stride)
            metrics = text.metrics(stride) if found is None else dict(found.metrics)
            unchecked = text.compared_bytes or 0
            if overlap or 0 < unchecked <= QUICK_BYTES:
                try:
                    shared, unchecked = text.overlap(), 0
                except RunError:  # its training text is damaged, which need not concern another text
                    if overlap:
                        raise
    except MissingColumnError as error:
        raise DataError(f"{error.line}; this run reads '{error.column}', so rename the column") from None
    measured = {"": metrics}
    if quantize == "auto":
        quantize = load_together(run, quantize=quantize).quantized  # says which, and why
    if quantize is not None:
        loaded.quantize(quantize)
        measured = {"as trained": metrics, quantize: loaded.evaluate(sources, stride=stride, encoding=encoding)}
    baseline = loaded.results().get(BASELINE) if sources is None else None  # known for the run's own text
    if baseline is not None:
        metrics[BASELINE] = baseline
    if figure is not None:
        from weft.explain.confusion import ConfusionMatrix

        ConfusionMatrix(tuple(map(tuple, metrics["matrix"])), tuple(metrics["labels"])).save(figure)
    if out is not None and found is not None:
        from weft.evaluate.page import EvaluationPage

        table = _table(measured, _remarks(metrics, shared, unchecked))
        page = EvaluationPage(f"Evaluation of {loaded.path.name}", table, found, shared)
        echo(f"wrote {page.save(out)}", err=as_json)
    if as_json:
        from weft.runs.lines import record

        smaller = {key: value for key, value in measured.get(quantize or "", {}).items() if isinstance(value, float)}
        echo(record({**metrics, **({quantize: smaller} if quantize else {}), **_records(found, shared)}))
        return
    tables = [_table(measured, _remarks(metrics, shared, unchecked)), *_confusion(metrics)]
    tables += [*(found.tables() if details and found else ()), *(overlap_tables(shared) if shared else ())]
    for number, table in enumerate(tables):
        if number:
            echo()
        columns.show(table)


BASELINE = "baseline_bits_per_byte"
UNITS = {
    "loss": "nats per token",
    "perplexity": "of the next token",
    "bits_per_byte": "of UTF-8 text; bytes that no token spells, such as unknown words, count 8 bits each",
    "bits_per_character": "of the same text",
    "unknown_share": "of all tokens",
    BASELINE: "bits per byte of character frequencies alone",
}


def _table(measured: dict[str, dict[str, Any]], remarks: Sequence[str]) -> "Table":
    """The metrics with their intervals, or with what a second column costs."""
    from weft.errors import counted
    from weft.figures.tables import Table
    from weft.recipe.metrics import metric

    first, last = next(iter(measured.values())), list(measured.values())[-1]
    several, text = len(measured) > 1, "bits_per_byte" in first
    intervals = {} if several else first.get("intervals", {})
    rows = []
    for key, value in first.items():
        if isinstance(value, float):
            shown = ".4%" if metric(key).format.endswith("%") else ".4f"
            cells = [format(metrics[key], shown) for metrics in measured.values() if key in metrics]
            if several and key in last and value:
                cells.append(f"{last[key] / value - 1:+.2%}")
            elif key in intervals:
                cells.append("–".join(format(end, shown) for end in intervals[key]))
            title = "baseline" if key == BASELINE else metric(key).title  # what it is stands beside the value
            rows.append([title, *cells, UNITS.get(key, "") if text else ""])
        elif isinstance(value, str):
            rows.append([key.replace("_", " "), value, ""])
    if text:
        rows.append(["tokens", f"{first['tokens']:,}", f"each scored once; {counted(first['bytes'], 'byte')}"])
    names = ["", *measured, *(["cost"] if several else ["95 % interval"] if intervals else []), ""]
    filled = [[*row[:-1], *[""] * (len(names) - len(row)), row[-1]] for row in rows]
    return Table(names, filled, "", remarks, (0, len(names) - 1))


def _remarks(metrics: dict[str, Any], shared: "Overlap | None", unchecked: int) -> list[str]:
    """What is to be known of a text besides: how sure the metrics are, and whether it was trained on."""
    if "sections" not in metrics:
        return []
    several = f"Intervals: a bootstrap over {metrics['sections']:,} sections of the text."
    why = "a single section" if metrics["sections"] == 1 else "impossible to the model"
    lines = [several if metrics["intervals"] else f"No intervals: the text is {why}."]
    if shared is not None:
        lines.append(f"Overlap: {shared.line}.")
    elif unchecked:
        lines.append(
            f"Overlap with the training text: not looked for; --overlap reads {unchecked / 1e6:,.0f} MB for it."
        )
    return lines


def _confusion(metrics: dict[str, Any]) -> "list[Table]":
    """The confusion matrix, where there is one."""
    from weft.figures.tables import Table

    if "matrix" not in metrics:
        return []
    counts = [
        (label, *(f"{n:,}" for n in row)) for label, row in zip(metrics["labels"], metrics["matrix"], strict=True)
    ]
    return [Table(("actual ↓  predicted →", *metrics["labels"]), counts, "")]


def _records(found: "Details | None", shared: "Overlap | None") -> dict[str, Any]:
    """What else was found, for JSON."""
    records: dict[str, Any] = {}
    if shared is not None:
        kept = {key: value for key, value in vars(shared).items() if key not in ("unit", "longest")}
        longest = [each._asdict() for each in shared.longest]
        records["overlap"] = {"unit": str(shared.unit), "share": shared.share, **kept, "longest": longest}
    if found is not None:
        rows = {"by_position": found.positions, "by_frequency": found.frequencies}
        records |= {name: [{**each._asdict(), "loss": each.loss} for each in few] for name, few in rows.items()}
        records["passages"] = [each._asdict() for each in found.passages]
    return records
