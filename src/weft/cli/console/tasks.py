"""`weft evaluate RUN --tasks …`: a run on tasks of the Language Model Evaluation Harness."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from weft.cli.console import columns
from weft.cli.console.loading import loading
from weft.figures.tables import Table

NONE = ("N/A", None)


class Asked(NamedTuple):
    """The options of `weft evaluate` that are about tasks."""

    tasks: str | None
    folder: Path | None
    limit: int | None
    as_json: bool


def evaluate_on_tasks(run: Path, asked: Asked, others: Mapping[str, Any]) -> None:
    """Print the results of a run on tasks: a line a metric, or as JSON what the harness gives.

    `others` are the options that are not for tasks, with their values.
    """
    names = _names(asked, others)
    with loading():
        import torch

        from weft.api.load import load
        from weft.api.tasks import evaluate_tasks

    found = evaluate_tasks(load(run, dtype=torch.float32), names, limit=asked.limit, folder=asked.folder)
    if asked.as_json:
        kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
        columns.print_json({key: found[key] for key in kept if key in found})
        return
    rows = [row for task, metrics in found["results"].items() for row in _rows(found, task, metrics)]
    remarks = [] if asked.limit is None else [f"on the first {asked.limit} examples of each task only"]
    filters = "filter" if any(row[2] for row in rows) else ""
    header = ("task", "shots", filters, "metric", "", "value", "± stderr")
    columns.show(Table(header, rows, "", remarks, text=(0, 2, 3, 4)))


def _names(asked: Asked, others: Mapping[str, Any]) -> list[str]:
    """The names of the tasks, if all that is asked for can be done with them."""
    from weft.errors import ConfigError

    if asked.tasks is None:
        option, value = ("--limit", asked.limit) if asked.folder is None else ("--tasks-path", asked.folder)
        raise ConfigError(f"{option} {value}: it is about tasks, which --tasks names")
    names = [name.strip() for name in asked.tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks '{asked.tasks}': expected the name of a task, or several with commas between them")
    for option, value in others.items():
        if value:
            shown = value[0] if isinstance(value, list) else "" if value is True else value
            raise ConfigError(f"{option} {shown}".strip() + ": tasks have data and metrics of their own; leave it out")
    if find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks {asked.tasks}: they need the package lm-eval; pip install 'weft[lm-eval]'")
    return names


def _rows(found: dict[str, Any], task: str, metrics: dict[str, Any]) -> list[list[str]]:
    """A task's metrics, the arrow up where more is better."""
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
