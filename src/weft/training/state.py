"""What a run remembers from step to step; it is saved with every checkpoint."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.errors import RunError
from weft.models.base import LanguageModel
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training.guard import Guard, Row


@dataclass
class TrainingState:
    """What a run remembers besides weights and moments."""

    step: int = 0
    tokens: int = 0
    waiting: list[list[float]] = field(default_factory=list)  # loss, nll, norm, targets, discarded; not yet logged
    loss: float = math.nan
    best: float | None = None
    best_step: int | None = None
    worse: int = 0  # evaluations since the best one
    validation: dict[str, float] = field(default_factory=dict)
    guard: Guard = field(default_factory=Guard)
    micro: int | None = None  # rows at a time, where the pre-flight found them (batch.micro = auto)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> "TrainingState":
        """From what a checkpoint holds of it. JSON keeps floats to the bit."""
        return cls(**{**notes, "guard": Guard(**notes["guard"])})

    def lose_best(self, run: RunFolder) -> int | None:
        """Forget the best evaluation where the weights that gave it are gone or damaged; its step, if that is so."""
        step = self.best_step
        if step in (None, self.step):
            return None
        with suppress(RunError):
            checkpoint.verify(run.checkpoints / checkpoint.checkpoint_name(step))
            return None
        self.best = self.best_step = None
        return step

    def unseen(self) -> list[Row]:
        """The steps since the guard's last look."""
        new = self.waiting[len(self.waiting) - (self.step - self.guard.step) :]
        return [Row(loss, norm, bool(discarded)) for loss, _, norm, _, discarded in new]

    def take_waiting(self) -> dict[str, float]:
        """The metrics of one line over the steps that wait for it. They wait no longer. A step that was not finite is
        counted, and kept out of the mean of the others."""
        rows, self.waiting = self.waiting, []
        good = [row for row in rows if math.isfinite(row[0]) and math.isfinite(row[2])] or rows
        targets = sum(row[3] for row in good)
        loss, nll = (sum(row[i] * row[3] for row in good) / targets for i in (0, 1))
        self.loss = loss
        metrics = {"loss": loss, "gradient_norm": max(row[2] for row in good)}
        if nll != loss:  # smoothing or z-loss: the loss is not −log p
            metrics["nll"] = nll
        discarded = round(sum(row[4] for row in rows))
        return metrics | ({"discarded": discarded} if discarded else {})


@dataclass(frozen=True)
class RunResult:
    """What came out of a run. `validation` holds the last evaluation's metrics, empty where nothing was held out."""

    run: RunFolder
    model: LanguageModel
    steps: int
    loss: float
    validation: dict[str, float]
    best_step: int | None
    seconds: float
