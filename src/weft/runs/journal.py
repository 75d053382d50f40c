"""What a run says while it goes: metrics.jsonl and timings.jsonl, TensorBoard, Weights & Biases, a progress bar.

metrics.jsonl holds only what the recipe decides, so that a resumed run's file equals that of a run that never
stopped, line for line. Whatever depends on the machine's mood is in timings.jsonl.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.errors import ConfigError
from weft.files import sync, write_text
from weft.recipe.config import LogConfig, Recipe
from weft.runs.folder import RunFolder, read_lines, record

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """A line for a person, kept away from results on stdout."""
    print(line, file=sys.stderr, flush=True)


class Journal:
    """Appends records to a run's metrics and timings, and to what else the recipe asks for."""

    def __init__(self, run: RunFolder, recipe: Recipe, after: int = 0):
        """`after` is the last step whose lines stay: a resumed run writes the later ones again."""
        self._run, self._recipe = run, recipe
        self._open(after)

    def _open(self, after: int) -> None:
        run, log = self._run, self._recipe.log
        for path in (run.metrics, run.timings):
            _cut(path, after)
        self._metrics = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._timings = open(run.timings, "a", encoding="utf-8")  # noqa: SIM115
        self._watchers: list[Watcher] = []
        if log.tensorboard:
            self._watchers.append(TensorBoard(run, after))
        if log.wandb != "off":
            self._watchers.append(WeightsAndBiases(run, self._recipe))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line that repeats when the run is repeated."""
        self._append(self._metrics, {"step": step, **values})

    def timings(self, step: int, values: Mapping[str, float]) -> None:
        """A line that doesn't."""
        self._append(self._timings, {"step": step, **values})

    def _append(self, file: Any, values: dict[str, Any]) -> None:
        file.write(record(values) + "\n")
        # what a full disk doesn't take stays in the file's buffer for the next time; `sync` is where it must succeed
        with suppress(OSError):
            file.flush()
        for watcher in self._watchers:
            watcher.add(values["step"], {key: value for key, value in values.items() if key != "step"})

    def rewind(self, after: int) -> list[dict[str, Any]]:
        """Take back the lines after a step, for a run that goes back; the metrics among them."""
        self.close()
        taken = [line for line in steps(self._run.metrics) if line["step"] > after]
        self._open(after)
        return taken

    def sync(self) -> None:
        """Wait until every line is on the disk; a checkpoint must not be ahead of its metrics."""
        for file in (self._metrics, self._timings):
            sync(file)

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._timings):
            with suppress(OSError):
                file.close()
        for watcher in self._watchers:
            watcher.close()


class Unwritten(Journal):
    """For a process that helps another one, which writes for both: they know the same numbers."""

    def _open(self, after: int) -> None:
        """There are no files."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """A line that the other one writes."""

    def timings(self, step: int, values: Mapping[str, float]) -> None:
        """Likewise."""

    def rewind(self, after: int) -> list[dict[str, Any]]:
        """Nothing was written."""
        return []

    def sync(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Nothing is open."""


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that belong to a step; whatever else somebody wrote there is passed over."""
    return (line for line in read_lines(path) if type(line.get("step")) is int)


def _cut(path: Path, after: int) -> None:
    if path.exists():
        kept = [record(line) + "\n" for line in steps(path) if line["step"] <= after]
        write_text(path, "".join(kept))


class Watcher(Protocol):
    """Something else that wants to see the numbers."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, run: RunFolder, after: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run.tensorboard, purge_step=after + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same numbers for Weights & Biases. A resumed run adds to the one that was started."""

    def __init__(self, run: RunFolder, recipe: Recipe):
        wandb = import_module("wandb")
        started = next((line["time"] for line in read_lines(run.events) if line.get("event") == "start"), "")
        identity = hashlib.sha256(f"{run.path.resolve()} {started}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="weft",
            name=recipe.name,
            id=identity,
            resume="allow",
            dir=str(run.path),
            mode=recipe.log.wandb,
            settings={"silent": True},
            config=recipe.model_dump(mode="json", exclude_none=True),
        )
        # steps are a column of their own: a run that goes back writes some of them again
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def check_log(settings: LogConfig) -> None:
    """Refuse, before anything is written, to log to what is not installed."""
    if settings.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise ConfigError(
                "log.tensorboard = true: tensorboard is not installed; pip install 'weft[tensorboard]', or leave it out"
            ) from None
    if settings.wandb != "off":
        try:
            import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"log.wandb = '{settings.wandb}': wandb is not installed; pip install wandb, or leave it out"
            ) from None


class Clock:
    """Seconds of training since the last reading, without what evaluations and checkpoints took."""

    def __init__(self, step: int, tokens: int):
        self._since, self._step, self._tokens = time.perf_counter(), step, tokens

    def lap(self, step: int, tokens: int) -> dict[str, float]:
        """Speed since the last lap."""
        now = time.perf_counter()
        seconds, steps, read = max(1e-9, now - self._since), step - self._step, tokens - self._tokens
        self._since, self._step, self._tokens = now, step, tokens
        return {"seconds": round(seconds, 6), "steps": steps, "tokens_per_second": read / seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that doesn't count."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


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
