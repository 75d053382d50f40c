"""Log a run to metrics.jsonl and timings.jsonl, and on request to TensorBoard and Weights & Biases.

metrics.jsonl holds only values that the recipe determines, so a resumed run's file equals that of an uninterrupted run,
line for line. Values that differ between machines are in timings.jsonl.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from weft.errors import ConfigError
from weft.progress import warn
from weft.recipe.config import LogConfig, Recipe
from weft.runs.folder import RunFolder
from weft.runs.lines import checked_line, checked_lines, read_lines
from weft.storage.files import sync, write_text


class Journal:
    """Append lines to a run's metrics and timings, and to the trackers that the recipe enables."""

    def __init__(self, run: RunFolder, recipe: Recipe, after: int = 0):
        """`after` is the last step whose lines are kept: a resumed run writes the later ones again."""
        self._run, self._recipe = run, recipe
        self._open(after)

    def _open(self, after: int) -> None:
        run, log, paths = self._run, self._recipe.log, (self._run.metrics, self._run.timings)
        self._lines = dict.fromkeys(paths, 0)  # number of lines in each file
        for path in (path for path in paths if path.exists()):
            kept = [line for line in read_lines(path) if line["step"] <= after]
            write_text(path, checked_lines(kept))
            self._lines[path] = len(kept)
        self._files: dict[Path, IO[str]] = {path: path.open("a", encoding="utf-8") for path in paths}
        self._trackers: list[Tracker] = []
        if log.tensorboard:
            self._trackers.append(_tensorboard(run, after))
        if log.wandb != "off":
            self._trackers.append(_wandb(run, self._recipe))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl."""
        self._append(self._run.metrics, {"step": step, **values})

    def timings(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line to timings.jsonl."""
        self._append(self._run.timings, {"step": step, **values})

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        if path in self._files:
            self._lines[path] += 1
            self._files[path].write(checked_line(values, self._lines[path]))
            # if the disk is full, the line stays buffered until the next attempt; `sync` must succeed
            with suppress(OSError):
                self._files[path].flush()
        for add, _ in self._trackers:
            add(values["step"], {key: value for key, value in values.items() if key != "step"})

    def rewind(self, after: int) -> list[dict[str, Any]]:
        """Remove the lines after a step, for a rollback; return the removed metrics."""
        self.close()
        removed = [line for line in read_lines(self._run.metrics) if line["step"] > after]
        self._open(after)
        return removed

    def sync(self) -> None:
        """Wait until every line is on disk: a checkpoint must not be ahead of its metrics."""
        for file in self._files.values():
            sync(file)

    def close(self) -> None:
        """Close the files and the trackers."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        for _, end in self._trackers:
            end()


class FollowerJournal(Journal):
    """Journal of other ranks than 0: writes nothing, because rank 0 logs the same values."""

    def _open(self, after: int) -> None:
        self._files, self._trackers = {}, []


def check_lines(run: RunFolder, recipe: Recipe, step: int) -> None:
    """Warn about logged steps up to `step`, that of a checkpoint, without a line in metrics.jsonl or timings.jsonl."""
    # before a change of the recipe, `log.every` may have been different
    changed = max((line["step"] for line in read_lines(run.events) if line.get("event") == "recipe"), default=0)
    for path in (run.metrics, run.timings):
        lines = read_lines(path)
        logged = {line["step"] for line in lines if "loss" in line or "seconds" in line}
        evaluated = {line["step"] for line in lines if any(key.startswith("validation_") for key in line)}
        last = {step} if step == recipe.steps else set()
        lost = (_steps(recipe.log.every, step) | last) - logged
        if evaluated:
            lost |= (_steps(recipe.evaluate.every, step) | last) - evaluated
        if lost := {missing for missing in lost if missing > changed}:
            warn(f"{path}: no line of step {', '.join(map(str, sorted(lost)[:3]))}{' …' if len(lost) > 3 else ''}")


def _steps(every: int | None, last: int) -> set[int]:
    return set(range(every, last + 1, every)) if every else set()


# logs a step's values, and ends the log
Tracker = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def _tensorboard(run: RunFolder, after: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run.tensorboard, purge_step=after + 1)

    def add(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return add, writer.close


def _wandb(run: RunFolder, recipe: Recipe) -> Tracker:
    """Open the run's log at Weights & Biases; a resumed run continues the same log."""
    wandb = import_module("wandb")
    started = next((line["time"] for line in read_lines(run.events) if line.get("event") == "start"), "")
    run_id = hashlib.sha256(f"{run.path.resolve()} {started}".encode()).hexdigest()[:16]
    settings = recipe.model_dump(mode="json", exclude_none=True)
    options = {"name": recipe.name, "mode": recipe.log.wandb, "config": settings, "settings": {"silent": True}}
    log = wandb.init(project="weft", id=run_id, resume="allow", dir=str(run.path), **options)
    log.define_metric("*", step_metric="step")  # W&B's own step can't go back, as a rollback does
    return lambda step, values: log.log({"step": step, **values}), log.finish


def check_log(settings: LogConfig) -> None:
    """Raise a ConfigError if the recipe enables a tracker that is not installed."""
    try:
        problem = "log.tensorboard = true: tensorboard is not installed; pip install 'weft[tensorboard]'"
        if settings.tensorboard:
            import_module("torch.utils.tensorboard")
        problem = f"log.wandb = '{settings.wandb}': wandb is not installed; pip install wandb"
        if settings.wandb != "off":
            import_module("wandb")
    except ImportError:
        raise ConfigError(f"{problem}, or leave it out") from None
