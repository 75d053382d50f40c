"""What a run writes down as it goes: metrics.jsonl and timings.jsonl, and the same for TensorBoard and W&B.

metrics.jsonl holds only what the recipe decides, so that a resumed run's file equals that of a run that never
stopped, line for line. What varies from machine to machine is in timings.jsonl.
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
from weft.runs.lines import all_checked, checked, read_lines
from weft.storage.files import sync, write_text


class Journal:
    """Appends records to a run's metrics and timings, and to what else the recipe asks for."""

    def __init__(self, run: RunFolder, recipe: Recipe, after: int = 0):
        """`after` is the last step whose lines stay: a resumed run writes the later ones again."""
        self._run, self._recipe = run, recipe
        self._open(after)

    def _open(self, after: int) -> None:
        run, log = self._run, self._recipe.log
        paths = (run.metrics, run.timings)
        self._lines = dict.fromkeys(paths, 0)  # how many there are
        for path in (path for path in paths if path.exists()):
            kept = [line for line in read_lines(path) if line["step"] <= after]
            write_text(path, all_checked(kept))
            self._lines[path] = len(kept)
        self._files: dict[Path, IO[str]] = {path: path.open("a", encoding="utf-8") for path in paths}
        self._watchers: list[Watcher] = []
        if log.tensorboard:
            self._watchers.append(_tensorboard(run, after))
        if log.wandb != "off":
            self._watchers.append(_wandb(run, self._recipe))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line that repeats when the run is repeated."""
        self._append(self._run.metrics, {"step": step, **values})

    def timings(self, step: int, values: Mapping[str, float]) -> None:
        """A line that doesn't."""
        self._append(self._run.timings, {"step": step, **values})

    def _append(self, path: Path, values: dict[str, Any]) -> None:
        if path in self._files:
            self._lines[path] += 1
            self._files[path].write(checked(values, self._lines[path]))
            # what a full disk doesn't take stays in its buffer for the next time; `sync` is where it must succeed
            with suppress(OSError):
                self._files[path].flush()
        for add, _ in self._watchers:
            add(values["step"], {key: value for key, value in values.items() if key != "step"})

    def rewind(self, after: int) -> list[dict[str, Any]]:
        """Take back the lines after a step, for a run that goes back; the metrics among them."""
        self.close()
        taken = [line for line in read_lines(self._run.metrics) if line["step"] > after]
        self._open(after)
        return taken

    def sync(self) -> None:
        """Wait until every line is on the disk; a checkpoint must not be ahead of its metrics."""
        for file in self._files.values():
            sync(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        for _, end in self._watchers:
            end()


class FollowerJournal(Journal):
    """For a process that another one leads, which writes for both: they know the same numbers."""

    def _open(self, after: int) -> None:
        self._files, self._watchers = {}, []


def check_lines(run: RunFolder, recipe: Recipe, step: int) -> None:
    """Report steps up to this one, which a checkpoint holds, that were logged and have no line: a checkpoint is never
    ahead of its metrics. Before a change of the recipe they may have been logged at other steps."""
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


# what takes a step's values, and what ends it
Watcher = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]


def _tensorboard(run: RunFolder, after: int) -> Watcher:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run.tensorboard, purge_step=after + 1)

    def add(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return add, writer.close


def _wandb(run: RunFolder, recipe: Recipe) -> Watcher:
    """A resumed run adds to the one that was started."""
    wandb = import_module("wandb")
    started = next((line["time"] for line in read_lines(run.events) if line.get("event") == "start"), "")
    own = hashlib.sha256(f"{run.path.resolve()} {started}".encode()).hexdigest()[:16]
    given = {"name": recipe.name, "mode": recipe.log.wandb, "config": recipe.model_dump(mode="json", exclude_none=True)}
    quiet = {"silent": True}
    watched = wandb.init(project="weft", id=own, resume="allow", dir=str(run.path), settings=quiet, **given)
    # steps are a column of their own: a run that goes back writes some of them again
    watched.define_metric("*", step_metric="step")
    return lambda step, values: watched.log({"step": step, **values}), watched.finish


def check_log(settings: LogConfig) -> None:
    """Refuse, before anything is written, to log to what is not installed."""
    try:
        asked = "log.tensorboard = true: tensorboard is not installed; pip install 'weft[tensorboard]'"
        if settings.tensorboard:
            import_module("torch.utils.tensorboard")
        asked = f"log.wandb = '{settings.wandb}': wandb is not installed; pip install wandb"
        if settings.wandb != "off":
            import_module("wandb")
    except ImportError:
        raise ConfigError(f"{asked}, or leave it out") from None
