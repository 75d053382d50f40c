"""A model and its optimizer, which start, are saved and are put back together; also when training has gone wrong."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

from weft.errors import DivergedError
from weft.models.base import LanguageModel
from weft.recipe.config import SettledRecipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, writing
from weft.training import optimizer
from weft.training.state import TrainingState
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

    def load(self, path: Path) -> dict[str, Any]:
        """Put back a checkpoint; its notes."""
        return checkpoint.load(path, self.model, self.optimizer)


def roll_back(
    run: RunFolder, recipe: SettledRecipe, learner: Learner, state: TrainingState, since: int
) -> TrainingState:
    """Put the last good checkpoint from before step `since` back, or fresh weights; the state to continue from.

    Later checkpoints are removed: the run will write them again. What the guard has learned is on the disk with the
    next one only: a process that is killed before goes through the same trouble once more, to the same end. After too
    many attempts in a row the run gives up.
    """
    guard = state.guard
    if guard.tries >= recipe.guard.rollbacks:
        tried = f"{guard.tries} rollback{'s' if guard.tries > 1 else ''} did not help"
        raise DivergedError(
            f"{run.path}: training went wrong at step {since}{f' and {tried}' if guard.tries else ''}; lower "
            f"optimizer.lr, lengthen schedule.warmup, look at the text, or allow more with guard.rollbacks"
        )
    # an attempt that failed from one checkpoint is followed by one from the checkpoint before it
    before = min(since, guard.back_to) if guard.tries else since
    path = next(checkpoint.intact(run.checkpoints, before), None)
    if path is not None:
        earlier = TrainingState.from_notes(learner.load(path))
    else:
        earlier = TrainingState(micro=state.micro)
        learner.restart(recipe)
    with writing(run.checkpoints):
        checkpoint.forget_after(run.checkpoints, earlier.step)
    earlier.lose_best(run)
    earlier.guard = guard.go_back(earlier.guard, recipe.guard)
    return earlier
