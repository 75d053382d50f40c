"""`weft evaluate`: the metrics of a trained model."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from weft.cli.console import options
from weft.cli.console.distributed import load_together, refuse_together, together
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading, print_json, print_tables
from weft.errors import ConfigError
from weft.figures.tables import Table

NONE = ("N/A", None)
NOT_FOR_TASKS = ("data", "targets", "stride", "figure", "quantize", "details", "overlap", "out")


@together
def evaluate(
    context: typer.Context,
    run: options.Run,
    data: list[str] | None = option(
        None, "Text to evaluate on instead of the held-out part.", "--data", "-d", value="SOURCE..."
    ),
    targets: options.Targets = None,
    stride: int | None = option(
        None,
        "Use overlapping windows: each starts this many tokens after the last and scores only what is new. A "
        "smaller stride is slower and gives tokens more context. A recurrent model that carries its state needs "
        "none.",
        value="TOKENS",
    ),
    encoding: str = option("utf-8", "The encoding of the files of --data, such as cp1252.", value="NAME"),
    figure: Path | None = option(None, "Draw a classifier's confusion matrix: .svg, .png or .pdf.", value="FILE"),
    quantize: str | None = option(None, "Also measure with smaller weights: bf16, int8, int4 or auto.", value="BITS"),
    details: bool = flag("--details", "Add the loss by context and token frequency, and the most surprising passages."),
    overlap: bool = flag(
        "--overlap", "Also look for the text in the training text, by 13-grams of words. Short texts always are."
    ),
    out: Path | None = option(None, "Write the details to this page, .html.", value="FILE"),
    tasks: str | None = option(None, "Evaluate on these tasks of lm-evaluation-harness instead.", value="NAME,..."),
    tasks_path: Path | None = option(None, "A folder of your own tasks (.yaml) for --tasks.", value="DIR"),
    limit: int | None = option(None, "Use only the first N examples of each task.", value="N", min=1),
    as_json: bool = flag("--json", "Print the metrics as JSON."),
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …

    A language model reads text in windows of the length it was trained with, and each token is scored once. Windows
    cross the borders of documents, unless it was trained with data.document_mask: then no document sees another, and
    the bytes of its first token, which nothing predicts, count 8 bits each. Intervals come from a bootstrap over
    documents, and over equal pieces of a long one.

    $ weft evaluate runs/gpt-tiny --data other.txt
    """
    sources = [*(data or []), *context.args] or None  # `--data *.txt` arrives as --data a.txt b.txt …
    if tasks is not None or tasks_path is not None or limit is not None:
        from weft.parallel.ranks import join

        refuse_together(join(), {"--tasks": tasks})  # its harness would ask, and print, in each of them
        _evaluate_on_tasks({**context.params, "data": sources})
        return
    with loading():
        import torch

        from weft.api.evaluation_report import Wanted, evaluation_report
        from weft.api.load import check_width
        from weft.parallel.ranks import join
    from weft.figures.picture import FIGURES, PAGE, check_picture
    from weft.runs.lines import record

    if quantize is not None:
        check_width(quantize)
    if figure is not None:
        check_picture(figure, FIGURES)
    if out is not None:
        check_picture(out, (PAGE,))
    if sources and not data:
        raise ConfigError(f"'{sources[0]}': text is given with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: it is that of the files of --data, which isn't given")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    refuse_together(join(), {"--quantize": quantize, "--figure": figure, "--out": out})
    refuse_together(join(), {"--data": "-" in (sources or ()) and "-"})  # there is one standard input
    loaded = load_together(run, dtype=torch.float32)  # as it learned, whatever it would write with
    wanted = Wanted(sources, targets or (), stride, encoding, figure, quantize, details, overlap, out)
    found = evaluation_report(loaded, wanted)
    if figure is not None:
        from weft.figures.heatmap import ConfusionMatrix

        ConfusionMatrix(tuple(map(tuple, found.metrics["matrix"])), tuple(found.metrics["labels"])).save(figure)
    if out is not None:
        from weft.evaluate.page import EvaluationPage

        assert found.details is not None
        page = EvaluationPage(f"Evaluation of {loaded.path.name}", found.metrics_table(), found.details, found.overlap)
        echo(f"wrote {page.save(out)}", err=as_json)
    if as_json:
        echo(record(found.record()))
    else:
        print_tables(*found.tables(details))


def _evaluate_on_tasks(given: Mapping[str, Any]) -> None:
    """Print the results of a run on tasks: a line a metric, or as JSON what the harness gives.

    `given` are the options of `weft evaluate` by their names.
    """
    names, folder, limit = _names(given), given["tasks_path"], given["limit"]
    with loading():
        import torch

        from weft.api.lm_eval import evaluate_tasks
        from weft.api.load import load

    found = evaluate_tasks(load(given["run"], dtype=torch.float32), names, limit=limit, folder=folder)
    if given["as_json"]:
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        print_json({key: found[key] for key in kept if key in found})
        return
    rows = [row for task, metrics in found["results"].items() for row in _rows(found, task, metrics)]
    remarks = [] if limit is None else [f"on the first {limit} examples of each task only"]
    filters = "filter" if any(row[2] for row in rows) else ""
    header = ("task", "shots", filters, "metric", "", "value", "± stderr")
    print_tables(Table(header, rows, "", remarks, text=(0, 2, 3, 4)))


def _names(given: Mapping[str, Any]) -> list[str]:
    tasks = given["tasks"]
    if tasks is None:
        option = "limit" if given["tasks_path"] is None else "tasks_path"
        raise ConfigError(f"--{option.replace('_', '-')} {given[option]}: it is about tasks, which --tasks names")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks '{tasks}': expected the name of a task, or several with commas between them")
    for option in NOT_FOR_TASKS:
        if value := given[option]:
            shown = value[0] if isinstance(value, list) else "" if value is True else value
            named = f"--{option} {shown}".strip()
            raise ConfigError(f"{named}: tasks have data and metrics of their own; leave it out")
    if find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks {tasks}: they need the package lm-eval; pip install 'weft[lm-eval]'")
    return names


def _rows(found: dict[str, Any], task: str, metrics: dict[str, Any]) -> list[list[str]]:
    rows: list[list[str]] = []
    better = found.get("higher_is_better", {}).get(task, {})
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue  # its name, or what stands beside another
        error = metrics.get(f"{metric}_stderr,{filtered}")
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        arrow = {True: "↑", False: "↓"}.get(better.get(metric), "")
        name = str(metrics.get("alias", task)).strip() if not rows else ""
        shots = str(found.get("n-shot", {}).get(task, "")) if not rows else ""
        deviation = "" if error in NONE else f"{error:.4f}"
        rows.append([name, shots, "" if filtered == "none" else filtered, metric, arrow, shown, deviation])
    return rows
