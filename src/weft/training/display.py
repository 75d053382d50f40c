"""What a person sees while a run goes: a progress bar on a terminal, else a line now and then."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.progress import Log


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

    def __init__(self, steps: int, first: int, log: Log, quiet: bool):
        self._log, self._steps, self._first = log, steps, first
        self._quiet = quiet
        self._started = time.perf_counter()
        self._every = max(1, steps // 20)
        self._shown = first
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if not quiet and console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeRemainingColumn(),
                console=console,
                transient=False,
                expand=True,
            )
            self._task = self._progress.add_task("", total=steps, completed=first, metrics="")

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

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The latest metrics."""
        text = " · ".join(_printed(key, value) for key, value in metrics.items())
        if self._progress is not None:
            self._progress.update(self._task, completed=step, metrics=text)
        elif not self._quiet and (step - self._shown >= self._every or self._shown == self._first):
            self._shown = step
            self._log(f"step {step}/{self._steps} · {text} · {self._left(step)} left")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            self._log(text)

    def _left(self, step: int) -> str:
        spent = time.perf_counter() - self._started
        seconds = round(spent / max(1, step - self._first) * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _printed(key: str, value: float) -> str:
    match key:
        case "tokens_per_second":
            return f"{value:,.0f} tok/s"
        case "mfu":
            return f"{value:.0%} MFU"
        case "gradient_norm":
            return f"grad {value:.2f}"
        case _:
            return f"{key} {value:.3f}"
