"""The runs of a folder at a glance, and what two recipes differ in: from the settings and the events, without torch."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.config import Tree, flat
from weft.costs.count import count
from weft.errors import RunError, WeftError
from weft.models.config import Recurrent
from weft.recipe.config import Recipe
from weft.recipe.metrics import metric
from weft.recipe.resolve import resolve
from weft.runs.folder import ENDS, LOCK, RunFolder
from weft.runs.lines import read_lines
from weft.storage import files
from weft.storage.files import is_locked

TAIL = 1 << 16  # bytes of metrics.jsonl in which its last step stands


@dataclass(frozen=True)
class RunRow:
    """A run at a glance. `best` is that of the objective's metric, unless the recipe names another in evaluate.metric.

    `data` is what it was trained on, as the recipe names it.
    `state` is finished, interrupted, running, imported or damaged; `problem` says what is wrong with a damaged one.
    """

    name: str
    path: str
    state: str
    objective: str | None = None
    data: tuple[str, ...] = ()
    model: str | None = None
    parameters: int | None = None
    steps_done: int | None = None
    steps: int | None = None
    metric: str | None = None
    best: float | None = None
    bytes: int = 0
    changed: float = 0.0  # seconds since 1970
    problem: str | None = None


def list_runs(folder: Path) -> list[RunRow]:
    """The runs in a folder, the one that changed last first; of a run's own folder, that run."""
    return sorted(map(run_row, run_folders(folder)), key=lambda row: row.changed, reverse=True)


def run_folders(folder: Path) -> list[RunFolder]:
    """The runs in a folder by name, those too that never reached their first step; of a run's own folder, that run."""
    if (folder / "config.toml").is_file():
        return [RunFolder(folder)]
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        raise RunError(f"{folder}: no such folder; `weft train` makes runs/") from None
    except OSError as error:
        raise RunError(f"{folder}: cannot be read: {error.strerror}") from None
    signs = ("config.toml", "events.jsonl", LOCK)
    return [RunFolder(path) for path in inside if any((path / name).exists() for name in signs)]


def run_row(run: RunFolder) -> RunRow:
    """A run at a glance, whatever is wrong with it."""
    size, changed = _size(run.path)
    row = RunRow(run.path.name or str(run.path), str(run.path), "damaged", bytes=size, changed=changed)
    try:
        if not run.config.is_file():
            if is_locked(run.path / LOCK):
                return replace(row, state="running")
            return replace(row, problem="there is no config.toml in it: it never reached its first step")
        recipe, events = run.recipe(), list(read_lines(run.events))
        state, problem = _state(run, recipe, events)
        read = (name for part in recipe.data.parts for name in (*part.sources, part.prepared) if name)
        data = (*read, *recipe.data.targets)
        full = replace(row, state=state, problem=problem, objective=recipe.objective.kind, data=data)
        if state != "imported":
            full = replace(full, steps_done=_steps_done(run, state), steps=recipe.steps)
        if (best := _best(recipe, events, state == "finished")) is not None:
            full = replace(full, metric=best[0], best=best[1])
        model = recipe.model.cell if isinstance(recipe.model, Recurrent) else recipe.model.kind
        return replace(full, model=model, parameters=count(recipe.model).parameters or None)
    except (WeftError, OSError) as error:
        return replace(row, problem=str(error).removeprefix(f"{run.config}: "))


def _state(run: RunFolder, recipe: Recipe, events: list[Tree]) -> tuple[str, str | None]:
    if is_locked(run.path / LOCK):
        return "running", None
    happened = [event.get("event") for event in events]
    if (lost := run.lost_step()) is not None:
        return "damaged", f"its last checkpoint, that of step {lost}, is gone"
    if not run.steps():
        return "damaged", "it has no checkpoint"
    if not recipe.data.parts or happened[:1] == ["import"]:
        return "imported", None
    last = next((what for what in reversed(happened) if what in ENDS), None)
    return "finished" if last == "finish" else "interrupted", None


def _steps_done(run: RunFolder, state: str) -> int | None:
    """The last step: that of the newest checkpoint, or the last one logged while it runs."""
    if state == "running":
        with suppress(OSError), files.open_regular(run.metrics) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            if found := re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE):
                return int(found[-1])
    return max(run.steps(), default=None)


def _best(recipe: Recipe, events: list[Tree], finished: bool) -> tuple[str, float] | None:
    """How good it is, and by which metric: of a finished run the final value, else the best of its evaluations."""
    asked, own = recipe.evaluate.metric, recipe.objective.headline
    for name in (own, asked) if asked == "loss" else (asked,):
        found: dict[bool, list[float]] = {True: [], False: []}
        for event in events:
            value, kind = event.get(name), event.get("event")
            if kind in ("evaluation", "averaged", "result") and isinstance(value, int | float):
                found[kind == "result"].append(float(value))
        if found[True] and (finished or not found[False]):
            return name, found[True][-1]
        if found[False]:
            return name, (min if metric(name).lower_is_better else max)(found[False])
    return None


def _size(folder: Path) -> tuple[int, float]:
    """The bytes of all files in a folder, and when the youngest was written."""
    total, changed = 0, 0.0
    with suppress(OSError):
        changed = folder.stat().st_mtime
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it may have gone since
                about = os.lstat(os.path.join(parent, name))
                total += about.st_size
                changed = max(changed, about.st_mtime) if name != LOCK else changed
    return total, changed


def recipe_of(source: str) -> Recipe:
    """The recipe of a run, a .toml file, a recipe's name or a preset."""
    if (Path(source) / "config.toml").is_file():
        return RunFolder(source).recipe()
    return resolve(source)


def differences(one: Recipe, other: Recipe) -> list[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, with both values; None where a recipe leaves a key out."""
    left, right = (flat(recipe.model_dump(mode="json", exclude_none=True)) for recipe in (one, other))
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]
