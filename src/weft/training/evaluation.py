"""Evaluation during training: how good the weights are by now, and which of them are the best."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import ConfigError, suggestion
from weft.models.base import LanguageModel, evaluating
from weft.recipe.config import SettledRecipe
from weft.recipe.metrics import metric
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.folder import RunFolder
from weft.runs.journal import Journal
from weft.training.display import Display
from weft.training.objective import Objective
from weft.training.precision import autocast
from weft.training.state import TrainingState
from weft.training.worker import Worker


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a run. The best so far is part of the run's state, so that it is saved with it."""

    recipe: SettledRecipe
    run: RunFolder
    model: LanguageModel
    objective: Objective[Any]
    worker: Worker

    def measure(self) -> dict[str, float]:
        """The objective's metrics on held-out data."""
        if not self.objective.holds_out:
            return {}
        with evaluating(self.model), torch.no_grad(), autocast(self.recipe.precision, self.worker.device):
            return self.objective.evaluate(self.model)

    def evaluate(self, state: TrainingState, journal: Journal, display: Display) -> bool:
        """Measure, and report; whether the weights are the best so far. The leading process does it for all."""
        values, state.best = self.worker.ranks.share(lambda: (self.measure(), state.best))
        state.validation = values
        journal.metrics(state.step, {f"validation_{key}": value for key, value in values.items()})
        self.run.event("evaluation", step=state.step, **values)
        if self.worker.ranks.leads:
            with evaluating(self.model):
                texts = self.objective.sample(self.model)
            if texts:
                self.run.event("samples", step=state.step, texts=texts)
        better = self._better(values, state.best)
        if better:
            state.best, state.best_step = values[self.recipe.evaluate.metric], state.step
        state.worse = 0 if better else state.worse + 1
        display.line(f"step {state.step}: {_printed(values, better)}")
        return better

    def average(self, state: TrainingState, display: Display) -> None:
        """Evaluate the mean of the last checkpoints' weights; where it is better than all of them, it is the best."""
        last = self.recipe.checkpoint.average
        if not last or not self.objective.holds_out or not self.worker.ranks.leads or state.step < self.recipe.steps:
            return
        path, over = average_checkpoints(self.run.checkpoints, last)
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        checkpoint.load_weights(path, self.model)
        values = self.measure()
        self.model.load_state_dict(own)
        better = self._better(values, state.best)
        if better:
            checkpoint.link(self.run.checkpoints, "best", path)
        self.run.event("averaged", steps=over, best=better, **values)
        display.line(f"mean of {len(over)} checkpoints: {_printed(values, better)}")

    def _better(self, values: Mapping[str, float], best: float | None) -> bool:
        """Whether `evaluate.metric` is the best so far."""
        name = self.recipe.evaluate.metric
        if name not in values:
            raise ConfigError(f"evaluate.metric = '{name}': not measured here; {suggestion(name, list(values))}")
        value = values[name]
        if not math.isfinite(value):
            return False
        return best is None or (value < best if metric(name).lower_is_better else value > best)


def _printed(values: Mapping[str, float], better: bool) -> str:
    metrics = " · ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in values.items())
    return f"validation {metrics}{' (best so far)' if better else ''}"
