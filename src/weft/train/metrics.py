"""What a run says while it goes: metrics.jsonl and timings.jsonl, TensorBoard, a progress bar or a few plain lines.

metrics.jsonl holds only what the recipe decides, so that a resumed run's file equals that of a run that never
stopped, line for line. Whatever depends on the machine's mood is in timings.jsonl.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.errors import ConfigError
from weft.train.checkpoint import write_atomic
from weft.train.config import LogConfig, Recipe
from weft.train.run import RunFolder, read_lines, record

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """A line for a person, kept away from results on stdout."""
    print(line, file=sys.stderr, flush=True)


class Journal:
    """Appends records to a run's metrics and timings, and to TensorBoard where the recipe asks for it."""

    def __init__(self, run: RunFolder, tensorboard: bool, after: int = 0):
        """`after` is the last step whose lines stay: a resumed run writes the later ones again."""
        for path in (run.metrics, run.timings):
            _cut(path, after)
        self._metrics = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._timings = open(run.timings, "a", encoding="utf-8")  # noqa: SIM115
        self._writer = _tensorboard(run.tensorboard, after) if tensorboard else None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line that repeats when the run is repeated."""
        self._append(self._metrics, {"step": step, **values})

    def timings(self, step: int, values: Mapping[str, float]) -> None:
        """A line that doesn't."""
        self._append(self._timings, {"step": step, **values})

    def _append(self, file: Any, values: dict[str, Any]) -> None:
        file.write(record(values) + "\n")
        file.flush()
        if self._writer is not None:
            for key, value in values.items():
                if key != "step":
                    self._writer.add_scalar(key, value, values["step"])

    def sync(self) -> None:
        """Wait until every line is on the disk; a checkpoint must not be ahead of its metrics."""
        for file in (self._metrics, self._timings):
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._timings.close()
        if self._writer is not None:
            self._writer.close()


def _cut(path: Path, after: int) -> None:
    if path.exists():
        kept = [record(line) + "\n" for line in read_lines(path) if line["step"] <= after]
        write_atomic(path, "".join(kept))


def check_log(settings: LogConfig) -> None:
    """Refuse, before anything is written, to log to what is not installed."""
    if settings.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise ConfigError(
                "log.tensorboard = true: tensorboard is not installed; pip install 'weft[tensorboard]', or leave it out"
            ) from None


def _tensorboard(folder: Path, after: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=after + 1)


class Display:
    """A progress bar when stderr is a terminal, else a plain line now and then; `quiet` shows neither."""

    def __init__(self, recipe: Recipe, first: int, say: Say, quiet: bool):
        assert recipe.steps is not None
        self._say, self._steps, self._first = say, recipe.steps, first
        self._quiet = quiet
        self._started = time.perf_counter()
        self._every = max(1, recipe.steps // 20)
        self._told = first
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if not quiet and console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=console,
                transient=False,
                expand=True,
            )
            self._task = self._progress.add_task("", total=recipe.steps, completed=first, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, step: int) -> None:
        """One more step is done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The latest numbers."""
        text = " · ".join(_figure(key, value) for key, value in figures.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=text)
        elif not self._quiet and (step - self._told >= self._every or self._told == self._first):
            self._told = step
            self._say(f"step {step}/{self._steps} · {text} · {self._left(step)} left")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            self._say(text)

    def _left(self, step: int) -> str:
        spent = time.perf_counter() - self._started
        seconds = round(spent / max(1, step - self._first) * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _figure(key: str, value: float) -> str:
    match key:
        case "tokens_per_second":
            return f"{value:,.0f} tok/s"
        case "mfu":
            return f"{value:.0%} MFU"
        case "gradient_norm":
            return f"grad {value:.2f}"
        case _:
            return f"{key} {value:.3f}"
