"""A model and its optimizer, which start, are saved and are put back together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

from weft.models.base import LanguageModel
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.snapshot import Snapshot, snapshot
from weft.training import optimizer
from weft.training.weights import first_model


@dataclass
class Learner:
    """A model in training."""

    model: LanguageModel
    optimizer: optim.Optimizer

    def restart(self, recipe: SettledRecipe) -> None:
        """Back to the weights before the first step, with an optimizer that has seen no gradient."""
        torch.manual_seed(recipe.seed)
        self.model.load_state_dict(first_model(recipe).state_dict())
        self.optimizer = optimizer.build(recipe.optimizer, self.model)

    def snapshot(self, step: int, notes: Mapping[str, Any]) -> Snapshot:
        """A copy of everything that continuing after `step` needs."""
        return snapshot(step, self.model, self.optimizer, notes)

    def load(self, path: Path) -> dict[str, Any]:
        """Put back a checkpoint; its notes."""
        return checkpoint.load(path, self.model, self.optimizer).notes
