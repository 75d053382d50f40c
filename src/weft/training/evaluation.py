"""Evaluation during training: how good the weights are by now, and which of them are the best."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.errors import ConfigError, suggestion
from weft.models.base import evaluating
from weft.recipe.config import SettledRecipe
from weft.recipe.metrics import metric
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.folder import RunFolder
from weft.runs.journal import Journal
from weft.runs.report import write_report
from weft.training.display import Allowance, Display
from weft.training.learner import Learner
from weft.training.objective import Objective
from weft.training.precision import autocast
from weft.training.state import TrainingState
from weft.training.worker import Worker


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a run. The best so far is part of the run's state, so that it is saved with it."""

    recipe: SettledRecipe
    run: RunFolder
    learner: Learner
    objective: Objective[Any]
    worker: Worker
    samples: Allowance = field(default_factory=lambda: Allowance(0.05))
    pages: Allowance = field(default_factory=lambda: Allowance(0.01))

    @property
    def splits(self) -> bool:
        """Whether several processes hold the model in parts."""
        return self.learner.parallel.mesh.splits

    def measure(self, most: int | None = None) -> dict[str, float]:
        """The objective's metrics on held-out data; on `most` tokens of it where that is less than the recipe asks."""
        objective = self.objective if most is None else self.objective.reading_less(most)
        if not objective.holds_out:
            return {}
        parallel = self.learner.parallel
        with evaluating(parallel.model), torch.no_grad(), autocast(self.recipe.precision, self.worker.device):
            return parallel.within(objective.evaluate)

    def evaluate(self, state: TrainingState, journal: Journal, display: Display) -> bool:
        """Measure, and report; whether the weights are the best so far. The leading process does it for all, or all do
        it together where each holds a part of the model."""
        began = time.perf_counter()
        found = self.measure() if self.splits else None
        values, state.best = self.worker.ranks.share(lambda: (found or self.measure(), state.best))
        seconds = round(time.perf_counter() - began, 3)
        state.validation = values
        journal.metrics(state.step, {f"validation_{key}": value for key, value in values.items()})
        self.run.event("evaluation", step=state.step, seconds=seconds, **values)
        if self.worker.ranks.leads:
            self._sample(state)
            self.report()
        better = self._better(values, state.best)
        if better:
            state.best, state.best_step = values[self.recipe.evaluate.metric], state.step
        state.worse = 0 if better else state.worse + 1
        display.line(f"step {state.step}: {_printed(values, self.recipe.evaluate.metric, better)}")
        return better

    def _sample(self, state: TrainingState) -> None:
        """What the model writes by now, for the report. Writing is slow: it may take a twentieth of the time at most,
        and the last text is always written. No metric depends on it."""
        if self.splits or (state.step < self.recipe.steps and not self.samples.affordable()):
            return  # a model in parts writes when it is whole again, at the end
        with self.samples.spent(), evaluating(self.learner.model):
            texts = self.objective.sample(self.learner.model)
        if texts:
            self.run.event("samples", step=state.step, texts=texts)

    def report(self, *, last: bool = False) -> None:
        """Write report.html as far as the run is, unless that has cost too much already; the `last` one always."""
        if last or self.pages.affordable():
            with self.pages.spent():
                try:
                    write_report(self.run)
                except Exception as error:  # whatever it is, the training is worth more than a page about it
                    self.run.event("report failed", reason=f"{type(error).__name__}: {error}")

    def average(self, state: TrainingState, display: Display) -> None:
        """Evaluate the mean of the last checkpoints' weights; where it is better than all of them, it is the best."""
        last, ranks = self.recipe.checkpoint.average, self.worker.ranks
        takes_part = self.splits or ranks.leads
        if not last or not self.objective.holds_out or state.step < self.recipe.steps or not takes_part:
            return

        def written() -> tuple[str, list[int]]:
            path, steps = average_checkpoints(self.run.checkpoints, last)
            return str(path), steps

        place, over = ranks.share(written) if self.splits else written()
        path = Path(place)
        with self.learner.holding(path):
            values = self.measure()
        if not ranks.leads:
            return
        better = self._better(values, state.best)
        if better:
            checkpoint.link(self.run.checkpoints, "best", path)
        self.run.event("averaged", steps=over, best=better, **values)
        display.line(f"mean of {len(over)} checkpoints: {_printed(values, self.recipe.evaluate.metric, better)}")

    def _better(self, values: Mapping[str, float], best: float | None) -> bool:
        name = self.recipe.evaluate.metric
        if name not in values:
            raise ConfigError(f"evaluate.metric = '{name}': not measured here; {suggestion(name, list(values))}")
        value, lower = values[name], metric(name).lower_is_better
        return math.isfinite(value) and (best is None or (value < best if lower else value > best))


def _printed(values: Mapping[str, float], decides: str, better: bool) -> str:
    """The first metrics on a line of a terminal, and the one that `decides`; the report has all."""
    shown = [key for place, key in enumerate(values) if place < 3 or key == decides]
    metrics = " · ".join(f"{metric(key).title} {values[key]:{metric(key).format}}" for key in shown)
    return f"validation {metrics}{' (best)' if better else ''}"
