"""`weft evaluate RUN --tasks …`: a run on tasks of the Language Model Evaluation Harness."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from weft.cli.console.terminal import loading, print_json, print_tables
from weft.errors import ConfigError
from weft.figures.tables import Table

NONE = ("N/A", None)
NOT_FOR_TASKS = ("data", "targets", "stride", "figure", "quantize", "details", "overlap", "out")


def evaluate_on_tasks(given: Mapping[str, Any]) -> None:
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
