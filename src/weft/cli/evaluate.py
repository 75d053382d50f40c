"""`weft evaluate`: evaluate a trained model."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from weft.cli.console import options
from weft.cli.console.distributed import distributed_command, load_sharded, refuse_sharded
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading, print_json, print_tables
from weft.errors import ConfigError
from weft.figures.tables import Table

MISSING = ("N/A", None)  # values of the harness
NOT_FOR_TASKS = ("data", "targets", "stride", "figure", "quantize", "details", "overlap", "out", "pairs")
NOT_FOR_PAIRS = ("data", "targets", "stride", "quantize", "overlap")  # nor for abilities


@distributed_command
def evaluate(
    context: typer.Context,
    run: options.Run,
    data: list[str] | None = option(
        None, "Evaluate on this instead of the held-out split.", "--data", "-d", value="SOURCE..."
    ),
    targets: options.Targets = None,
    stride: int | None = option(
        None,
        "Use overlapping windows: each starts this many tokens after the previous one and scores only the new tokens. "
        "Smaller is slower and gives more context. A recurrent model that carries its state needs none.",
        value="TOKENS",
    ),
    encoding: str = option("utf-8", "The encoding of the files of --data or --pairs, such as cp1252.", value="NAME"),
    figure: Path | None = option(
        None,
        "Draw a classifier's confusion matrix, or the results of --pairs or --abilities: .svg, .png or .pdf.",
        value="FILE",
    ),
    quantize: str | None = option(None, "Also evaluate quantised weights: bf16, int8, int4 or auto.", value="BITS"),
    details: bool = flag("--details", "Add the loss by context and by token frequency, and surprising passages."),
    overlap: bool = flag("--overlap", "Find passages of the training text, by 13-grams (always for short texts)."),
    out: Path | None = option(
        None, "Write the details, or the results of --pairs or --abilities, to this .html page.", value="FILE"
    ),
    pairs: str | None = option(
        None,
        "Evaluate on minimal pairs of sentences: a table or a folder, in BLiMP's format or two columns.",
        value="PATH",
    ),
    abilities: bool = flag("--abilities", "Test abilities by distance: agreement, copying, induction, counting …"),
    only: str | None = option(None, "Test only these abilities.", value="NAME,..."),
    distances: str | None = option(None, "Test abilities at these distances.", value="N,..."),
    checkpoints: str | None = option(
        None, "Measure --abilities or --pairs at these checkpoints: all, or steps.", value="all|STEP,..."
    ),
    tasks: str | None = option(None, "Evaluate on tasks of lm-evaluation-harness instead.", value="NAME,..."),
    tasks_path: Path | None = option(None, "A folder of custom tasks (.yaml) for --tasks.", value="DIR"),
    limit: int | None = option(
        None, "Use only the first N examples of each task, or N questions per distance.", value="N", min=1
    ),
    as_json: bool = flag("--json", "Print the metrics as JSON."),
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …

    A language model reads text in windows of the length it was trained with, and each token is scored once. Windows
    cross document boundaries, unless the run was trained with data.document_mask: then documents are independent, and
    each byte of a document's first token, which nothing predicts, counts 8 bits. Intervals come from a bootstrap over
    documents, and over equal sections of a long one.

    $ weft evaluate runs/gpt-tiny --data other.txt
    """
    sources = [*(data or []), *context.args] or None  # the shell expands `--data *.txt` to --data a.txt b.txt …
    if tasks is not None or tasks_path is not None or (limit is not None and not abilities):
        from weft.parallel.ranks import join

        refuse_sharded(join(), {"--tasks": tasks})  # the harness would run in each process
        _evaluate_on_tasks({**context.params, "data": sources})
        return
    if pairs is not None or abilities:
        _evaluate_without_data({**context.params, "data": sources})
        return
    _refuse(context.params, ("only", "distances", "checkpoints"), "the loss: they belong to --abilities")
    with loading():
        import torch

        from weft.api.evaluation_report import check_options, evaluation_report
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
        raise ConfigError(f"'{sources[0]}': unexpected argument; give data with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: the encoding of the files of --data, which is missing")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: the targets of the lines of --data, which is missing")
    refuse_sharded(join(), {"--quantize": quantize, "--figure": figure, "--out": out})
    refuse_sharded(join(), {"--data": "-" in (sources or ()) and "-"})  # only rank 0 has standard input
    loaded = load_sharded(run, dtype=torch.float32)  # as in training, not as in generation
    only_some = {"--targets": targets, "--figure": figure, "--quantize": quantize, "--details": details}
    check_options(loaded, {**only_some, "--overlap": overlap, "--out": out})
    report = evaluation_report(
        loaded,
        sources,
        targets=targets or (),
        stride=stride,
        encoding=encoding,
        quantize=quantize,
        details=details or out is not None,
        overlap=overlap,
    )
    if figure is not None:
        from weft.figures.heatmap import ConfusionMatrix

        ConfusionMatrix(tuple(map(tuple, report.metrics["matrix"])), tuple(report.metrics["labels"])).save(figure)
    if out is not None:
        from weft.evaluate.page import EvaluationPage

        assert report.details is not None
        title = f"Evaluation of {loaded.path.name}"
        page = EvaluationPage(title, report.metrics_table(), report.details, report.overlap)
        echo(f"wrote {page.save(out)}", err=as_json)
    if as_json:
        echo(record(report.record()))
    else:
        print_tables(*report.tables(details))


def _evaluate_without_data(arguments: Mapping[str, Any]) -> None:
    """Print the results of --pairs or --abilities; `arguments` are those of `weft evaluate`."""
    if arguments["pairs"] is not None:
        wrong = ("abilities", "only", "distances")
        _refuse(arguments, (*NOT_FOR_PAIRS, *wrong), "--pairs, which are the data")
    elif arguments["encoding"] != "utf-8":
        raise ConfigError(f"--encoding {arguments['encoding']}: --abilities need no data; leave it out")
    _refuse(arguments, NOT_FOR_PAIRS, "--abilities, which need no data")
    with loading():
        import torch

        from weft.api.abilities import QUESTIONS
        from weft.evaluate.minimal_pairs import read_pairs
    from weft.figures.picture import FIGURES, PAGE, check_picture
    from weft.parallel.ranks import join
    from weft.runs.lines import record

    refuse_sharded(join(), {"--pairs": arguments["pairs"], "--abilities": arguments["abilities"]})
    files = [
        check_picture(path, kinds)
        for path, kinds in ((arguments["figure"], FIGURES), (arguments["out"], (PAGE,)))
        if path
    ]
    pairs = None if arguments["pairs"] is None else read_pairs(arguments["pairs"], arguments["encoding"])
    only, distances = _listed(arguments["only"]), _numbers("distances", arguments["distances"])
    steps = arguments["checkpoints"]
    chosen = steps if steps in (None, "all") else _numbers("checkpoints", steps)

    def measure(run: Any) -> Any:
        if pairs is not None:
            return run.minimal_pairs(pairs)
        return run.abilities(only, distances=distances, questions=arguments["limit"] or QUESTIONS)

    run = load_sharded(arguments["run"], dtype=torch.float32)
    result = measure(run) if chosen is None else run.over_time(measure, chosen)
    for path in files:
        echo(f"wrote {result.save(path)}", err=True)
    if arguments["as_json"]:
        echo(record(result.record(arguments["details"])))
    else:
        print_tables(*result.tables())


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _numbers(option: str, value: str | None) -> list[int]:
    words = _listed(value)
    if not all(word.isdecimal() for word in words) or (value is not None and not words):
        expected = "numbers separated by commas, such as 4,16" + (", or all" if option == "checkpoints" else "")
        raise ConfigError(f"--{option} {value}: expected {expected}")
    return sorted({int(word) for word in words})


def _refuse(arguments: Mapping[str, Any], names: Sequence[str], instead: str) -> None:
    for name in names:
        if value := arguments[name]:
            shown = value[0] if isinstance(value, list) else "" if value is True else value
            raise ConfigError(f"{f'--{name} {shown}'.strip()}: not available with {instead}; leave it out")


def _evaluate_on_tasks(arguments: Mapping[str, Any]) -> None:
    """Print the results of a run on tasks: a line per metric, or the harness's JSON.

    `arguments` are those of `weft evaluate`.
    """
    names, folder, limit = _task_names(arguments), arguments["tasks_path"], arguments["limit"]
    with loading():
        import torch

        from weft.api.lm_eval import evaluate_tasks
        from weft.api.load import load

    results = evaluate_tasks(load(arguments["run"], dtype=torch.float32), names, limit=limit, folder=folder)
    if arguments["as_json"]:
        keys = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        print_json({key: results[key] for key in keys if key in results})
        return
    rows = [row for task, metrics in results["results"].items() for row in _rows(results, task, metrics)]
    remarks = [] if limit is None else [f"only on the first {limit} examples of each task"]
    filters = "filter" if any(row[2] for row in rows) else ""
    header = ("task", "shots", filters, "metric", "", "value", "± stderr")
    print_tables(Table(header, rows, "", remarks, text=(0, 2, 3, 4)))


def _task_names(arguments: Mapping[str, Any]) -> list[str]:
    tasks = arguments["tasks"]
    if tasks is None:
        if (folder := arguments["tasks_path"]) is not None:
            raise ConfigError(f"--tasks-path {folder}: needs --tasks, the names of tasks")
        raise ConfigError(f"--limit {arguments['limit']}: goes with --tasks or --abilities; add one, or leave it out")
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks '{tasks}': expected the name of a task, or several separated by commas")
    _refuse(arguments, NOT_FOR_TASKS, "--tasks, which define data and metrics")
    if find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks {tasks}: the package lm-eval is missing; pip install 'weft[lm-eval]'")
    return names


def _rows(results: dict[str, Any], task: str, metrics: dict[str, Any]) -> list[list[str]]:
    """Return the table rows of a task: its name, shots, filter, metric, direction, value and standard error."""
    rows: list[list[str]] = []
    higher_is_better = results.get("higher_is_better", {}).get(task, {})
    for key, value in metrics.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue  # the task's name, or the standard error of another metric
        error = metrics.get(f"{metric}_stderr,{filtered}")
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        arrow = {True: "↑", False: "↓"}.get(higher_is_better.get(metric), "")
        name = str(metrics.get("alias", task)).strip() if not rows else ""
        shots = str(results.get("n-shot", {}).get(task, "")) if not rows else ""
        deviation = "" if error in MISSING else f"{error:.4f}"
        rows.append([name, shots, "" if filtered == "none" else filtered, metric, arrow, shown, deviation])
    return rows
