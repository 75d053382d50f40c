"""What a person sees while a run goes: a progress bar on a terminal, else a line now and then."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from weft.progress import Bar, Log, drawn


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
    """A progress bar when stderr is a terminal, else a plain line now and then."""

    def __init__(self, bar: Bar | None, steps: int, first: int, log: Log):
        self._bar, self._log, self._steps, self._first = bar, log, steps, first
        self._started, self._every, self._shown = time.perf_counter(), max(1, steps // 20), first

    def step(self, step: int) -> None:
        """This step is done."""
        if self._bar is not None:
            self._bar.at(step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """The latest metrics."""
        text = " · ".join(_printed(key, value) for key, value in metrics.items())
        if self._bar is not None:
            self._bar.note(f"{step}/{self._steps} · {text}")
        elif step - self._shown >= self._every or self._shown == self._first:
            self._shown = step
            self._log(f"step {step}/{self._steps} · {text} · {self._left(step)} left")

    def line(self, text: str) -> None:
        """A line that stays."""
        (self._log if self._bar is None else self._bar.print)(text)

    def _left(self, step: int) -> str:
        spent = time.perf_counter() - self._started
        seconds = round(spent / max(1, step - self._first) * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


@contextmanager
def display(steps: int, first: int, log: Log, quiet: bool) -> Iterator[Display]:
    """The display of a run that starts after step `first`; a quiet one shows nothing."""
    if quiet:
        yield Display(None, steps, first, lambda line: None)
        return
    with drawn("training", steps) as bar:
        yield Display(bar, steps, first, log)


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
