"""How good the weights are on the way, and which of them are the best."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.errors import ConfigError, suggestion
from weft.models.base import LanguageModel
from weft.parallel.ranks import Ranks
from weft.recipe.config import Recipe
from weft.runs import checkpoint
from weft.runs.average import average_checkpoints
from weft.runs.folder import RunFolder
from weft.runs.journal import Display, Journal
from weft.training.precision import autocast
from weft.training.recovery import Progress

Evaluator = Callable[[LanguageModel], Mapping[str, float]]  # gives the loss, and what else tells how good it is
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "error")
Writer = Callable[[LanguageModel], Sequence[str]]  # what the model writes so far, without touching torch's generators


@dataclass(frozen=True)
class Evaluation:
    """What is asked of a run's model. The best so far stands in the run's progress, so that it is saved with it."""

    recipe: Recipe
    run: RunFolder
    model: LanguageModel
    evaluators: Sequence[Evaluator]
    writer: Writer | None
    device: torch.device
    ranks: Ranks

    def ask(self) -> dict[str, float]:
        """The evaluators' numbers."""
        assert self.recipe.precision is not None
        values: dict[str, float] = {}
        self.model.eval()
        try:
            with torch.no_grad(), autocast(self.recipe.precision, self.device):
                for evaluator in self.evaluators:
                    values |= evaluator(self.model)
        finally:
            self.model.train()
        return values

    def evaluate(self, progress: Progress, journal: Journal, display: Display) -> bool:
        """Ask, and tell; whether the weights are the best so far. The first of several processes asks for all."""
        values, progress.best = self.ranks.share(lambda: (self.ask(), progress.best))
        progress.validation = values
        journal.metrics(progress.step, {f"validation_{key}": value for key, value in values.items()})
        self.run.event("evaluation", step=progress.step, **values)
        if self.writer is not None:
            self.run.event("samples", step=progress.step, texts=list(self.writer(self.model.eval())))
            self.model.train()
        better = self._better(values, progress.best)
        if better:
            progress.best, progress.best_step = values[self.recipe.evaluate.metric], progress.step
        progress.worse = 0 if better else progress.worse + 1
        display.line(f"step {progress.step}: {_told(values, better)}")
        return better

    def average(self, progress: Progress, display: Display) -> None:
        """Try the mean of the last checkpoints' weights; where it is better than the best of them, it is the best."""
        last, steps = self.recipe.checkpoint.average, self.recipe.steps
        assert steps is not None
        if not last or not self.evaluators or not self.ranks.leads or progress.step < steps:
            return
        path, over = average_checkpoints(self.run.checkpoints, last)
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        checkpoint.load_weights(path, self.model)
        values = self.ask()
        self.model.load_state_dict(own)
        better = self._better(values, progress.best)
        if better:
            checkpoint.link(self.run.checkpoints, "best", path)
        self.run.event("averaged", steps=over, best=better, **values)
        display.line(f"mean of {len(over)} checkpoints: {_told(values, better)}")

    def _better(self, values: Mapping[str, float], best: float | None) -> bool:
        """Whether the figure that counts is the best so far: the lowest loss, or the highest of anything else."""
        metric = self.recipe.evaluate.metric
        if metric not in values:
            raise ConfigError(f"evaluate.metric = '{metric}': not measured here; {suggestion(metric, list(values))}")
        value = values[metric]
        if not math.isfinite(value):
            return False
        return best is None or (value < best if metric in LOWER_IS_BETTER else value > best)


def _told(values: Mapping[str, float], better: bool) -> str:
    figures = " · ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in values.items())
    return f"validation {figures}{' (best so far)' if better else ''}"
