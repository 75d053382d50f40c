"""What a comparison measured: a line of results.jsonl for each job, put together by contender.

A job is one training run: a contender, a part of the budget, a learning rate and a seed. What it ends with is the cost
of the same held-out text, section by section, so that the difference of two contenders can be resampled over sections.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weft.config import Config

Array = npt.NDArray[np.float64]
Axis = Literal["flops", "tokens", "seconds"]


class Outcome(Config):
    """A finished job.

    `nats` is the cost of each section of the held-out text, with 8 bits for every byte that no token spells, and
    `bytes` are the sections' sizes. `progress` has (tokens read, bits per byte) of the evaluations during training.
    Of its `parameters` each token is multiplied by `multiplied`: all but a table that is only looked up in. A job that
    `failed` says why, and has no sections.
    """

    contender: str
    share: float  # of the budget
    lr: float | None  # None for what is counted, not trained
    seed: int
    steps: int
    tokens: int
    flops: float
    seconds: float
    parameters: int
    multiplied: int = 0
    nats: tuple[float, ...] = ()
    bytes: tuple[float, ...] = ()
    progress: tuple[tuple[int, float], ...] = ()
    sample: str = ""
    failed: str = ""

    @property
    def bits_per_byte(self) -> float:
        """Over all sections; infinite for a job that failed."""
        return sum(self.nats) / math.log(2) / sum(self.bytes) if self.nats else math.inf


@dataclass(frozen=True)
class Result:
    """What a contender reached: its outcomes at every share of the budget with every seed, and those of the search for
    its rate.

    `changes` are the settings in which it differs from the recipe it is named after. `levels` says which value it has
    of each setting that is varied.
    """

    name: str
    recipe: str
    outcomes: tuple[Outcome, ...]
    sweep: tuple[Outcome, ...] = ()
    changes: Mapping[str, object] | None = None
    levels: Mapping[str, str] | None = None

    @property
    def shares(self) -> list[float]:
        """The parts of the budget it was trained with, ascending."""
        return sorted({outcome.share for outcome in self.outcomes if outcome.nats})

    def at(self, share: float) -> list[Outcome]:
        """The outcomes at one share, seed by seed."""
        found = [outcome for outcome in self.outcomes if outcome.share == share and outcome.nats]
        return sorted(found, key=lambda outcome: outcome.seed)

    @property
    def rate(self) -> float | None:
        """The learning rate at the largest share."""
        return max(self.outcomes, key=lambda outcome: outcome.share).lr if self.outcomes else None


@dataclass(frozen=True)
class Curve:
    """What a contender costs on the held-out text after so much training.

    `amounts` (rungs,) are FLOPs, tokens or seconds, ascending; `nats` (rungs, seeds, sections); `bytes` (sections,).
    """

    amounts: Array
    nats: Array
    bytes: Array

    @classmethod
    def of(cls, result: Result, axis: Axis = "flops") -> "Curve":
        """A contender's curve. Seeds that did not finish at every share are left out."""
        rows = [{outcome.seed: outcome for outcome in result.at(share)} for share in result.shares]
        seeds = sorted(set.intersection(*map(set, rows))) if rows else []
        if not seeds:
            return cls(np.zeros(0), np.zeros((0, 0, 0)), np.zeros(0))
        amounts = [float(np.mean([getattr(row[seed], axis) for seed in seeds])) for row in rows]
        nats = np.array([[row[seed].nats for seed in seeds] for row in rows], dtype=np.float64)
        return cls(np.array(amounts), nats, np.array(rows[0][seeds[0]].bytes, dtype=np.float64))

    def bits_per_byte(self) -> Array:
        """(rungs, seeds), over all sections."""
        return self.nats.sum(axis=2) / math.log(2) / self.bytes.sum()


@dataclass(frozen=True)
class Comparison:
    """Everything that a page tells: what was asked, on which text and machine, and what each contender reached.

    `facts` are lines about the text, the budget and the machine by what they are about; `notes` is what a reader has to
    know besides. `varied` names the settings of an ablation with their values, the base's first.
    """

    title: str
    command: str
    baseline: str
    contenders: tuple[Result, ...]
    facts: Mapping[str, str]
    notes: Sequence[str] = ()
    varied: Mapping[str, tuple[str, ...]] | None = None
