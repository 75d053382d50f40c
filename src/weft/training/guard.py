"""How a run is watched: which updates are discarded, when to roll back, and how to continue from there.

Training goes wrong in two ways. A batch gives a loss or a gradient that is not finite, or far out of the ordinary: its
update is discarded, and that is all. Or the weights themselves are corrupt: step after step goes wrong, and the run
rolls back to a checkpoint from before the trouble, skips the text that led there, and continues with smaller steps
(Chowdhery et al. 2022, §5.1, skip a few hundred batches before a spike in the same way, by hand).

What is out of the ordinary is measured against the median of the last steps, in units of their median absolute
deviation: both ignore the outliers they have to judge. A step's update is judged on the device, by limits that were
set when the numbers were last read; so watching costs no waiting. Everything is a function of the losses and norms
alone, and is saved with each checkpoint: a resumed run discards and rolls back at the same steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from weft.recipe.config import GuardConfig

MAX_FLOAT32 = 3.4028234663852886e38  # of fp32: infinity and NaN are not below it
GAUSSIAN = 1.4826  # a normal distribution's standard deviation in units of its median absolute deviation
CHANCE_MARGIN = 1.1  # a loss this much above chance is not noise


@dataclass(frozen=True)
class Row:
    """What a step measured: the loss and the gradient norm before its update, and whether that was discarded."""

    loss: float
    norm: float
    discarded: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass
class Guard:
    """All that the guard remembers. The second half survives a rollback."""

    step: int = 0  # the last one that was looked at
    losses: list[float] = field(default_factory=list)  # of the last good steps
    norms: list[float] = field(default_factory=list)  # of the last finite steps
    wrong: list[int] = field(default_factory=list)  # those of the last 2 × patience steps that went wrong
    first: float | None = None  # loss
    lowest: float | None = None  # median of the losses so far

    discarded: int = 0  # updates, in all
    tries: int = 0  # rollbacks in a row without getting any further
    furthest: int = 0  # step that an abandoned stretch reached
    back_to: int = 0  # step of the last rollback's checkpoint
    rate: float = 1.0  # times the schedule's
    shift: int = 0  # steps that the text is ahead of the step's number

    def limits(self, settings: GuardConfig) -> tuple[float, float]:
        """The loss and the gradient norm above which an update is discarded."""
        if settings.spike == 0.0 or len(self.losses) < settings.window // 4 or self.lowest is None:
            return MAX_FLOAT32, MAX_FLOAT32
        spread = max(GAUSSIAN * _deviation(self.losses), 0.05 * abs(self.lowest), 0.05)
        middle = median(self.norms)
        width = max(GAUSSIAN * _deviation(self.norms), 0.5 * middle)  # norms vary more, and clipping tames them
        return (
            min(MAX_FLOAT32, self.lowest + settings.spike * spread),
            min(MAX_FLOAT32, middle + settings.spike * width),
        )

    def observe(self, rows: Sequence[Row], settings: GuardConfig, chance: float) -> int | None:
        """Take in the steps since the last look; the first step of the trouble if it is time to roll back. `chance` is
        the loss of a model that has learned nothing, ln vocab_size."""
        ceiling = self.limits(settings)[0]
        since = None
        for row in rows:
            self.step += 1
            self.discarded += row.discarded
            if row.finite and self.first is None:
                self.first = row.loss
            highest = ceiling
            if settings.spike:  # a loss above both chance and the beginning: it learned nothing, or forgot it
                highest = min(ceiling, CHANCE_MARGIN * max(chance, self.first or chance))
            self.wrong = [step for step in self.wrong if step > self.step - 2 * settings.patience]
            if row.finite:
                self.norms.append(row.norm)
            if row.finite and row.loss <= highest:
                self.losses.append(row.loss)
            else:
                self.wrong.append(self.step)
            if since is None and len(self.wrong) >= settings.patience:
                since = self.wrong[0]
        del self.losses[: -settings.window], self.norms[: -settings.window]
        if len(self.losses) >= settings.window // 4:
            now = median(self.losses)
            self.lowest = now if self.lowest is None else min(self.lowest, now)
        if self.tries and not self.wrong and self.step > self.furthest + 2 * settings.patience:
            self.tries = 0
        return since

    def go_back(self, earlier: "Guard", settings: GuardConfig) -> "Guard":
        """The guard after a rollback to the checkpoint that holds `earlier`. The text continues after the last batch
        read, so the steps to come see others than those that were abandoned."""
        tries = self.tries + 1
        return replace(
            earlier,
            wrong=[],
            discarded=self.discarded,
            tries=tries,
            furthest=max(self.furthest, self.step),
            back_to=earlier.step,
            rate=self.rate * settings.slower**tries,
            shift=self.step + self.shift - earlier.step,
        )


def _deviation(values: Sequence[float]) -> float:
    """The median distance from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
