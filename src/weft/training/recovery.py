"""What a run remembers from step to step, and how it goes back to an earlier step when training has gone wrong."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import optim

from weft.errors import RunError
from weft.models.base import LanguageModel
from weft.recipe.config import Recipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training.guard import Guard, Row
from weft.training.weights import first_model


@dataclass
class Progress:
    """All that the loop itself remembers; it is saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    waiting: list[list[float]] = field(default_factory=list)  # loss, nll, norm, targets, discarded; not yet logged
    loss: float = math.nan
    best: float | None = None
    best_step: int | None = None
    worse: int = 0  # evaluations since the best one
    validation: dict[str, float] = field(default_factory=dict)
    guard: Guard = field(default_factory=Guard)

    def notes(self) -> dict[str, Any]:
        """For JSON. Python writes floats so that they read back to the same bits."""
        return asdict(self)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> "Progress":
        """What `notes` gave."""
        return cls(**{**notes, "guard": Guard(**notes["guard"])})

    def unseen(self) -> list[Row]:
        """The steps since the guard's last look."""
        new = self.waiting[len(self.waiting) - (self.step - self.guard.step) :]
        return [Row(loss, norm, bool(discarded)) for loss, _, norm, _, discarded in new]

    def take_waiting(self) -> dict[str, float]:
        """The figures of a metrics line over the steps that wait for one. They wait no longer.

        A batch that gives no number is counted, and kept out of the mean of those that do.
        """
        rows, self.waiting = self.waiting, []
        good = [row for row in rows if math.isfinite(row[0]) and math.isfinite(row[2])] or rows
        targets = sum(row[3] for row in good)
        loss, nll = (sum(row[i] * row[3] for row in good) / targets for i in (0, 1))
        self.loss = loss
        figures = {"loss": loss, "gradient_norm": max(row[2] for row in good)}
        if nll != loss:  # smoothing or z-loss: the loss is not −log p
            figures["nll"] = nll
        discarded = round(sum(row[4] for row in rows))
        return figures | ({"discarded": discarded} if discarded else {})


def go_back(
    run: RunFolder,
    recipe: Recipe,
    model: LanguageModel,
    optimizer: optim.Optimizer,
    progress: Progress,
    since: int,
) -> tuple[Progress, optim.Optimizer]:
    """Put the state of the last good checkpoint from before step `since` back, or that of a fresh start.

    Later checkpoints are removed: the run will write them again. After too many tries in a row it gives up.
    """
    guard = progress.guard
    if guard.tries >= recipe.guard.rollbacks:
        tried = f"{guard.tries} return{'s' if guard.tries > 1 else ''} to a checkpoint did not help"
        raise RunError(
            f"{run.path}: training went wrong at step {since}{f' and {tried}' if guard.tries else ''}; lower "
            f"optimizer.lr, lengthen schedule.warmup, look at the text, or allow more with guard.rollbacks"
        )
    # a try that failed from one checkpoint is followed by one from the checkpoint before it
    path = checkpoint.newest_before(run.checkpoints, min(since, guard.back_to) if guard.tries else since)
    if path is not None:
        earlier = Progress.from_notes(checkpoint.load(path, model, optimizer).notes)
    else:
        earlier = Progress()
        torch.manual_seed(recipe.seed)
        model.load_state_dict(first_model(recipe).state_dict())
        optimizer = recipe.optimizer.build(model)
    checkpoint.forget_after(run.checkpoints, earlier.step)
    if not (run.checkpoints / "best").exists():
        earlier.best = earlier.best_step = None
    earlier.guard = guard.go_back(earlier.guard, recipe.guard)
    return earlier, optimizer
