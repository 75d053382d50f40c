"""Evaluation during training: how good the weights are, and which of them are the best."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.errors import ConfigError, suggestion
from weft.figures.formats import fixed
from weft.models.base import evaluating
from weft.recipe.config import SettledRecipe
from weft.recipe.metrics import metric
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.folder import RunFolder
from weft.runs.journal import Journal
from weft.runs.report import write_report
from weft.training.display import Display, TimeBudget
from weft.training.guard import CHANCE_MARGIN
from weft.training.learner import Learner
from weft.training.objective import Objective
from weft.training.precision import autocast
from weft.training.state import TrainingState
from weft.training.worker import TrainingWorker

SHOWN_METRICS = 3  # printed after an evaluation, besides the one that decides; the report has all


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's model. The best evaluation so far is in the run's `TrainingState`, and is saved with it."""

    recipe: SettledRecipe
    run: RunFolder
    learner: Learner
    objective: Objective[Any]
    worker: TrainingWorker
    sample_time: TimeBudget = field(default_factory=lambda: TimeBudget(0.05))
    report_time: TimeBudget = field(default_factory=lambda: TimeBudget(0.01))

    @property
    def is_sharded(self) -> bool:
        """Whether several processes hold shards of the model."""
        return self.learner.parallel.mesh.is_sharded

    def measure(self, max_tokens: int | None = None) -> dict[str, float]:
        """Return the objective's metrics on held-out data, of at most `max_tokens` tokens."""
        if not self.objective.holds_out:
            return {}
        parallel = self.learner.parallel
        with evaluating(parallel.model), torch.no_grad(), autocast(self.recipe.precision, self.worker.device):
            return parallel.with_full_weights(lambda model: self.objective.evaluate(model, max_tokens))

    def evaluate(self, state: TrainingState, journal: Journal, display: Display) -> bool:
        """Measure and report; return whether the weights are the best so far. Rank 0 measures an unsharded model."""
        began = time.perf_counter()
        measured = self.measure() if self.is_sharded else None
        values, state.best = self.worker.ranks.share(lambda: (measured or self.measure(), state.best))
        seconds = round(time.perf_counter() - began, 3)
        state.validation = values
        journal.metrics(state.step, {f"validation_{key}": value for key, value in values.items()})
        self.run.event("evaluation", step=state.step, seconds=seconds, **values)
        if self.worker.ranks.leads:
            self._sample(state)
            self.report()
        better = self._is_better(values, state.best)
        if better:
            state.best, state.best_step = values[self.recipe.evaluate.metric], state.step
        state.worse = 0 if better else state.worse + 1
        display.line(f"step {state.step}: {self._line(values, better)}")
        return better

    def _sample(self, state: TrainingState) -> None:
        """Generate texts for the report, in at most a twentieth of the time; always after the last step."""
        if self.is_sharded or (state.step < self.recipe.steps and not self.sample_time.affordable()):
            return  # a sharded model generates once it is gathered, at the end
        with self.sample_time.spending(), evaluating(self.learner.model):
            texts = self.objective.sample(self.learner.model)
        if texts:
            self.run.event("samples", step=state.step, texts=texts)

    def report(self, *, last: bool = False) -> None:
        """Write report.html, unless that has taken too much time already; the `last` one always."""
        if last or self.report_time.affordable():
            with self.report_time.spending():
                try:
                    write_report(self.run)
                except Exception as error:  # a page about the training must never end it
                    self.run.event("report failed", reason=f"{type(error).__name__}: {error}")

    def average(self, state: TrainingState, display: Display) -> None:
        """Evaluate the mean of the last checkpoints' weights; link it as the best if it is better than all of them."""
        last, ranks = self.recipe.checkpoint.average, self.worker.ranks
        takes_part = self.is_sharded or ranks.leads
        if not last or not self.objective.holds_out or state.step < self.recipe.steps or not takes_part:
            return

        def write() -> tuple[str, list[int]]:
            path, steps = average_checkpoints(self.run.checkpoints, last)
            return str(path), steps

        name, steps = ranks.share(write) if self.is_sharded else write()
        path = Path(name)
        with self.learner.using_weights(path):
            values = self.measure()
        if not ranks.leads:
            return
        better = self._is_better(values, state.best)
        if better:
            checkpoint.link(self.run.checkpoints, "best", path)
        self.run.event("averaged", steps=steps, best=better, **values)
        display.line(f"mean of {len(steps)} checkpoints: {self._line(values, better)}")

    def _is_better(self, values: Mapping[str, float], best: float | None) -> bool:
        name = self.recipe.evaluate.metric
        if name not in values:
            raise ConfigError(f"evaluate.metric = '{name}': not measured here; {suggestion(name, list(values))}")
        value, lower = values[name], metric(name).lower_is_better
        return math.isfinite(value) and (best is None or (value < best if lower else value > best))

    def _line(self, values: Mapping[str, float], better: bool) -> str:
        decides = self.recipe.evaluate.metric
        shown = [key for number, key in enumerate(values) if number < SHOWN_METRICS or key == decides]
        metrics = " · ".join(f"{metric(key).title} {metric(key).text(values[key])}" for key in shown)
        chance = self.recipe.objective.chance(self.recipe.model.vocab_size)
        if values.get("loss", 0.0) > CHANCE_MARGIN * chance:
            return f"validation {metrics} (worse than a model that has learned nothing, {fixed(chance, '.2f')})"
        return f"validation {metrics}{' (best)' if better else ''}"
