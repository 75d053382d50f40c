"""The guard watches a run: it discards updates, rolls the run back when it diverges, and decides how to continue.

Training diverges in two ways. A batch gives a loss or a gradient that is not finite, or an outlier: its update is
discarded. Or the weights themselves are corrupt, and step after step is bad: the run rolls back to a checkpoint from
before the divergence, skips the text that led there, and continues with a lower learning rate (Chowdhery et al. 2022,
§5.1, skip a few hundred batches before a spike manually).

Outliers are measured from the median of the last steps, in units of their median absolute deviation: neither is
affected by the outliers themselves. An update is judged on the device, by limits set when the losses were last read,
so the guard never waits for the device. It depends on losses and norms alone, and is saved with each checkpoint: a
resumed run discards updates and rolls back at the same steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from weft.recipe.config import GuardConfig

MAX_FLOAT32 = 3.4028234663852886e38  # infinity and NaN are not below it
GAUSSIAN = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation
CHANCE_MARGIN = 1.1  # a loss this many times above chance is not noise


@dataclass(frozen=True)
class StepRecord:
    """The loss and the gradient norm before a step's update, and whether the update was discarded."""

    loss: float
    norm: float
    discarded: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass
class Guard:
    """State of the guard. The second half survives a rollback."""

    step: int = 0  # the last step observed
    losses: list[float] = field(default_factory=list)  # of the last good steps
    norms: list[float] = field(default_factory=list)  # of the last finite steps
    wrong: list[int] = field(default_factory=list)  # the bad ones of the last 2 × patience steps
    first: float | None = None  # loss
    lowest: float | None = None  # median loss so far

    discarded: int = 0  # updates, in total
    tries: int = 0  # consecutive rollbacks without getting further
    furthest: int = 0  # step that an abandoned attempt reached
    back_to: int = 0  # step of the last rollback's checkpoint
    rate: float = 1.0  # factor of the schedule's learning rate
    shift: int = 0  # steps that the text is ahead of the step number

    def limits(self, settings: GuardConfig) -> tuple[float, float]:
        """Return the loss and the gradient norm above which an update is discarded."""
        if settings.spike == 0.0 or len(self.losses) < settings.window // 4 or self.lowest is None:
            return MAX_FLOAT32, MAX_FLOAT32
        spread = max(GAUSSIAN * _deviation(self.losses), 0.05 * abs(self.lowest), 0.05)
        middle, spike = median(self.norms), settings.spike
        width = max(GAUSSIAN * _deviation(self.norms), 0.5 * middle)  # norms vary more, and clipping tames them
        return min(MAX_FLOAT32, self.lowest + spike * spread), min(MAX_FLOAT32, middle + spike * width)

    def observe(self, records: Sequence[StepRecord], settings: GuardConfig, chance: float) -> int | None:
        """Take in new steps; return the first bad one if it is time to roll back. `chance` is a fresh model's loss."""
        ceiling = self.limits(settings)[0]
        since = None
        for record in records:
            self.step += 1
            self.discarded += record.discarded
            if record.finite and self.first is None:
                self.first = record.loss
            highest = ceiling
            if settings.spike:  # a loss above both chance and the first one: nothing was learned, or it was forgotten
                highest = min(ceiling, CHANCE_MARGIN * max(chance, self.first or chance))
            self.wrong = [step for step in self.wrong if step > self.step - 2 * settings.patience]
            if record.finite:
                self.norms.append(record.norm)
            if record.finite and record.loss <= highest:
                self.losses.append(record.loss)
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
        """Return the guard after a rollback to the checkpoint that holds `earlier`. The text continues after the last
        batch read, so that the coming steps do not repeat the abandoned ones."""
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
    """Return the median absolute deviation."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
