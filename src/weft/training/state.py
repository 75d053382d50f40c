"""The state of a run from step to step, saved with every checkpoint."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.errors import RunError
from weft.models.base import LanguageModel
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.runs.report import ROUTING
from weft.training.guard import Guard, StepRecord


@dataclass
class TrainingState:
    """The progress of a run. Weights, moments and `StepState` are saved separately."""

    step: int = 0
    tokens: int = 0
    waiting: list[list[float]] = field(
        default_factory=list
    )  # loss, nll, norm, targets, discarded, routing …; not yet logged
    loss: float = math.nan
    best: float | None = None
    best_step: int | None = None
    worse: int = 0  # evaluations since the best one
    validation: dict[str, float] = field(default_factory=dict)
    guard: Guard = field(default_factory=Guard)
    collapsed: int = 0  # log lines in a row with a collapsed router of experts
    micro: int | None = None  # rows of a micro-batch that the pre-flight chose (batch.micro = auto)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> "TrainingState":
        """Restore the state from a checkpoint's notes. JSON keeps floats to the bit."""
        return cls(**{**notes, "guard": Guard(**notes["guard"])})

    def lose_best(self, run: RunFolder) -> int | None:
        """Forget the best evaluation if its weights are gone or damaged; return its step in that case."""
        step = self.best_step
        if step in (None, self.step):
            return None
        with suppress(RunError):
            checkpoint.verify(run.checkpoints / checkpoint.checkpoint_name(step))
            return None
        self.best = self.best_step = None
        return step

    def unseen(self) -> list[StepRecord]:
        """Return the steps that the guard has not observed yet."""
        new = self.waiting[len(self.waiting) - (self.step - self.guard.step) :]
        return [StepRecord(loss, norm, bool(discarded)) for loss, _, norm, _, discarded, *_ in new]

    def take_waiting(self) -> dict[str, float]:
        """Return one log line's metrics of the waiting steps, and clear them; means leave out non-finite steps."""
        rows, self.waiting = self.waiting, []
        good = [row for row in rows if math.isfinite(row[0]) and math.isfinite(row[2])] or rows
        targets = sum(row[3] for row in good)
        loss, nll = (sum(row[i] * row[3] for row in good) / targets for i in (0, 1))
        self.loss = loss
        metrics = {"loss": loss, "gradient_norm": max(row[2] for row in good)}
        if nll != loss:  # with smoothing or z-loss the loss is not −log p
            metrics["nll"] = nll
        routed = zip(ROUTING, zip(*(row[5:] for row in good), strict=True), strict=False)
        metrics |= {name: sum(values) / len(values) for name, values in routed}
        discarded = round(sum(row[4] for row in rows))
        return metrics | ({"discarded": discarded} if discarded else {})


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run. `validation` holds the metrics of the last evaluation, if data was held out."""

    run: RunFolder
    model: LanguageModel
    steps: int
    loss: float
    validation: dict[str, float]
    best_step: int | None
    seconds: float
