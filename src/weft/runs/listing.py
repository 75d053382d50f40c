"""List the runs of a folder, and compare two recipes: from settings and events alone, without torch."""

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
from weft.recipe.resolve import is_run, resolve
from weft.runs.folder import LOCK, STATES, RunFolder
from weft.runs.lines import read_lines
from weft.storage import files
from weft.storage.files import is_locked

TAIL_BYTES = 1 << 16  # bytes at the end of metrics.jsonl that are searched for its last step


@dataclass(frozen=True)
class RunRow:
    """Summary of a run. `metric` is evaluate.metric if the recipe sets it, else the objective's headline metric."""

    name: str
    path: str
    state: str  # finished, interrupted, running, imported or damaged
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
    problem: str | None = None  # of a damaged run


def list_runs(folder: Path) -> list[RunRow]:
    """Return the runs in a folder, the last changed first; if `folder` is a run, only that one."""
    return sorted(map(run_row, run_folders(folder)), key=lambda row: row.changed, reverse=True)


def run_folders(folder: Path) -> list[RunFolder]:
    """Return the runs in a folder by name, also those that never reached their first step; or `folder`, if a run."""
    if (folder / "config.toml").is_file():
        return [RunFolder(folder)]
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except FileNotFoundError:
        listed = " (`weft runs` alone lists them)" if str(folder) in ("list", "ls", "show") else ""
        raise RunError(f"{folder}: no such folder; `weft train` creates runs/{listed}") from None
    except NotADirectoryError:
        raise RunError(f"{folder}: a file; give a run's folder, or a folder of runs") from None
    except OSError as error:
        raise RunError(f"{folder}: cannot be read: {error.strerror}") from None
    markers = ("config.toml", "events.jsonl", LOCK)
    return [RunFolder(path) for path in folders if any((path / name).exists() for name in markers)]


def run_row(run: RunFolder) -> RunRow:
    """Summarise a run, even a damaged one."""
    size, changed = _size(run.path)
    row = RunRow(run.path.name or str(run.path), str(run.path), "damaged", bytes=size, changed=changed)
    try:
        if not run.config.is_file():
            if is_locked(run.path / LOCK):
                return replace(row, state="running")
            return replace(row, problem="there is no config.toml in it: it never reached its first step")
        recipe, events = run.recipe(), list(read_lines(run.events))
        state, problem = _state(run, recipe, events)
        sources = (name for part in recipe.data.parts for name in (*part.sources, part.prepared) if name)
        name, best = _best(recipe, events, state == "finished") or (None, None)
        data, parameters = (*sources, *recipe.data.targets), count(recipe.model).parameters or None
        model = recipe.model.cell if isinstance(recipe.model, Recurrent) else recipe.model.kind
        full = replace(row, state=state, problem=problem, objective=recipe.objective.kind, data=data, model=model)
        if state != "imported":
            full = replace(full, steps_done=_steps_done(run, state), steps=recipe.steps)
        return replace(full, metric=name, best=best, parameters=parameters)
    except (WeftError, OSError) as error:
        return replace(row, problem=str(error).removeprefix(f"{run.config}: "))


def _state(run: RunFolder, recipe: Recipe, events: list[Tree]) -> tuple[str, str | None]:
    if is_locked(run.path / LOCK):
        return "running", None
    names = [event.get("event") for event in events]
    if (lost := run.lost_step()) is not None:
        return "damaged", f"its last checkpoint, of step {lost}, is missing"
    if not run.steps():
        return "damaged", "it has no checkpoint"
    if not recipe.data.parts or names[:1] == ["import"]:
        return "imported", None
    last = next((name for name in reversed(names) if name in STATES), None)
    return "finished" if last == "finish" else "interrupted", None


def _steps_done(run: RunFolder, state: str) -> int | None:
    """Return the step of the newest checkpoint, or the last logged step of a running run."""
    if state == "running":
        with suppress(OSError), files.open_regular(run.metrics) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            if steps := re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE):
                return int(steps[-1])
    return max(run.steps(), default=None)


def _best(recipe: Recipe, events: list[Tree], finished: bool) -> tuple[str, float] | None:
    """Return a run's metric and its value: the final one of a finished run, otherwise the best of its evaluations."""
    requested, headline = recipe.evaluate.metric, recipe.objective.headline
    for name in (headline, requested) if requested == "loss" else (requested,):
        final, evaluated = list[float](), list[float]()
        for event in events:
            value, kind = event.get(name), event.get("event")
            if kind in ("evaluation", "averaged", "result") and isinstance(value, int | float):
                (final if kind == "result" else evaluated).append(float(value))
        if final and (finished or not evaluated):
            return name, final[-1]
        if evaluated:
            return name, (min if metric(name).lower_is_better else max)(evaluated)
    return None


def _size(folder: Path) -> tuple[int, float]:
    """Return the total size of the files in a folder, and when the last one was modified."""
    total, changed = 0, 0.0
    with suppress(OSError):
        changed = folder.stat().st_mtime
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed in the meantime
                status = os.lstat(os.path.join(parent, name))
                total += status.st_size
                changed = max(changed, status.st_mtime) if name != LOCK else changed
    return total, changed


def recipe_of(source: str) -> Recipe:
    """Return the recipe of a run, a .toml file, a recipe's name or a preset."""
    return RunFolder(source).recipe() if is_run(source) else resolve(source)


def differences(one: Recipe, other: Recipe) -> list[tuple[str, Any, Any]]:
    """Return the dotted keys whose values differ, with both values; None if a recipe doesn't set the key."""
    left, right = (flat(recipe.model_dump(mode="json", exclude_none=True)) for recipe in (one, other))
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]
