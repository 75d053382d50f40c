"""The display of a run: what to expect of it, then a progress bar on a terminal, or else a line from time to time."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from weft.costs.count import count
from weft.figures.formats import fixed
from weft.progress import Bar, Log, drawn_bar
from weft.recipe.config import SettledRecipe
from weft.recipe.objective import NextToken
from weft.text.builtin import GENERATED
from weft.training.worker import device_name

FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda loss: f"loss {fixed(loss)}",
    "gradient_norm": lambda norm: f"grad {fixed(norm, '.2f')}",
    "tokens_per_second": "{:,.0f} tok/s".format,
    "mfu": "{:.0%} MFU".format,
}


class TrainingClock:
    """Seconds of training since the last lap, without evaluations and checkpoints."""

    def __init__(self, step: int, tokens: int):
        self._since, self._step, self._tokens = time.perf_counter(), step, tokens

    def lap(self, step: int, tokens: int) -> dict[str, float]:
        """Return the seconds, steps and speed since the last lap."""
        now = time.perf_counter()
        seconds, steps, read = max(1e-9, now - self._since), step - self._step, tokens - self._tokens
        self._since, self._step, self._tokens = now, step, tokens
        return {"seconds": round(seconds, 6), "steps": steps, "tokens_per_second": read / seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the body."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


class TimeBudget:
    """Time for optional work: a fraction of the time since the budget was created."""

    def __init__(self, fraction: float):
        self._fraction, self._began, self._spent = fraction, time.perf_counter(), 0.0

    def affordable(self) -> bool:
        """Return whether the time spent so far is within the budget; always true the first time."""
        return self._spent <= self._fraction * (time.perf_counter() - self._began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Charge the time of the body to the budget."""
        began = time.perf_counter()
        yield
        self._spent += time.perf_counter() - began


class Display:
    """A progress bar when stderr is a terminal, or else a plain line from time to time."""

    def __init__(self, bar: Bar | None, steps: int, first: int, *, log: Log):
        self._bar, self._log, self._steps, self._first = bar, log, steps, first
        self._started, self._every, self._shown = time.perf_counter(), max(1, steps // 20), first

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.at(step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        text = " · ".join(FORMATS[key](metrics[key]) for key in FORMATS if key in metrics)
        if self._bar is not None:
            self._bar.note(f"{step}/{self._steps} · {text}")
        elif step - self._shown >= self._every or self._shown == self._first:
            self._shown, spent = step, time.perf_counter() - self._started
            seconds = round(spent / max(1, step - self._first) * (self._steps - step))
            left = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            self._log(f"step {step}/{self._steps} · {text} · {left} left")

    def line(self, text: str) -> None:
        (self._log if self._bar is None else self._bar.print)(text)


@contextmanager
def display(steps: int, first: int, log: Log, *, quiet: bool) -> Iterator[Display]:
    """Yield the display of a run that starts after step `first`; a quiet one shows nothing."""
    if quiet:
        yield Display(None, steps, first, log=lambda line: None)
        return
    with drawn_bar("training", steps) as bar:
        yield Display(bar, steps, first, log=log)


def expectations(recipe: SettledRecipe, sizes: tuple[int, int], step: int, *, device: torch.device) -> list[str]:
    """Return lines to print before the step after `step`; `sizes` are all parameters, and those trained."""
    parameters, trained = sizes
    where = f"from step {step}" if step else f"from {recipe.init}" if recipe.init else "from fresh weights"
    count_text = f"{trained:,} of {parameters:,}" if trained < parameters else f"{parameters:,}"
    begun = f"training {count_text} parameters {where} on {device_name(device)}"
    chance = recipe.objective.chance(vocab_size := recipe.model.vocab_size)
    if recipe.init or step or not math.isfinite(chance):  # trained weights do not begin at chance
        first = ""
    elif isinstance(recipe.objective, NextToken):
        first = f"; the loss should begin near ln {vocab_size} = {chance:.2f} and fall"
    else:
        first = f"; a model that has learned nothing has a loss of {chance:.2f}"
    if not isinstance(recipe.objective, NextToken) or recipe.init or recipe.batch.size is None:
        return [begun + first]
    tokens = recipe.steps * recipe.batch.size * recipe.batch.length
    work = count(recipe.model, recipe.batch.length).training() * tokens
    usual = f"{usual_bits_per_byte(work):.1f} bits per byte"
    sources = {source.removeprefix("builtin:") for part in recipe.data.parts for source in part.sources}
    if sources and sources <= GENERATED.keys():
        outcome = f"on English text it would end near {usual}, and on sentences of a small grammar far below"
    else:
        outcome = f"runs of this size on English text end near {usual}, give or take a fifth, given enough text"
    return [begun + first, f"{work:.1e} operations in total; {outcome}"]


def usual_bits_per_byte(flops: float) -> float:
    """Estimate the bits per byte of held-out English text after a training run of this many operations.

    A power law through two published runs: nanoGPT's CPU recipe for Shakespeare (0.8 M parameters, 1.5 M tokens: 7e12
    operations, 1.88 nats per character = 2.7 bits per byte) and its GPT-2 124M (300 G tokens: 2.2e20 operations, 2.85
    nats per token of 4.4 bytes = 0.93). LLaMA 7B (4e22 operations, near 0.65) lies on it too. It assumes a sensible
    recipe and text that is not repeated often; code and tables are easier, old or mixed languages harder.
    """
    return min(8.0, 2.7 * (flops / 7e12) ** -0.062)
