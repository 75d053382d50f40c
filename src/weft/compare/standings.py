"""How the contenders of a comparison stand at the end of their budget, best first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from weft.compare.bootstrap import bands
from weft.compare.multiplier import Multiplier, multiplier
from weft.compare.results import Comparison, Curve, Measured

NOTHING = "–"


@dataclass(frozen=True)
class Standing:
    """A contender at the largest share of the budget that it finished, over all seeds.

    `bits` per byte has the bounds of a 95 % interval; they are infinite where nothing was finished, and `failed` says
    why. There is no `multiplier` for the baseline, nor where one of the two multiplies nothing.
    """

    contender: Measured
    baseline: bool
    share: float
    seeds: int
    bits: float
    bounds: tuple[float, float]
    multiplier: Multiplier | None
    failed: str = ""

    @property
    def name(self) -> str:
        """The contender's."""
        return self.contender.name

    @property
    def finished(self) -> bool:
        """Whether there is anything to tell."""
        return math.isfinite(self.bits)

    @property
    def counted(self) -> bool:
        """Whether it is counted, not trained: then it costs no operations, however much text it has read."""
        return self.finished and not self.mean("flops")

    def mean(self, field: str) -> float:
        """A field of the outcomes at the largest share, over seeds."""
        return float(np.mean([getattr(outcome, field) for outcome in self.contender.at(self.share)]))

    @property
    def sample(self) -> str:
        """What it writes at the end."""
        return next((outcome.sample for outcome in self.contender.at(self.share) if outcome.sample), "")

    @property
    def half_width(self) -> float:
        """Of the interval."""
        return (self.bounds[1] - self.bounds[0]) / 2

    @property
    def differs(self) -> str:
        """Which recipe it is, where it has another name, and in what it differs; in an ablation the grid tells that."""
        if self.contender.levels is not None:
            return ""
        changes = [f"{key}={value}" for key, value in (self.contender.changes or {}).items()]
        recipe = [self.contender.recipe] if self.contender.recipe != self.name else []
        return " ".join(recipe + changes)

    def record(self) -> dict[str, Any]:
        """The same as values."""
        if not self.finished:
            return {"contender": self.name, "failed": self.failed}
        fields = ("parameters", "tokens", "flops", "seconds")
        found = self.multiplier
        read = ("value", "low", "high", "loss", "beyond", "at_full")
        return {
            "contender": self.name,
            "baseline": self.baseline,
            **{field: self.mean(field) for field in fields},
            "seeds": self.seeds,
            "bits_per_byte": self.bits,
            "low": self.bounds[0],
            "high": self.bounds[1],
            "learning_rate": self.contender.rate,
            "multiplier": None if found is None else {field: getattr(found, field) for field in read},
            "sample": self.sample,
        }

    def multiplier_text(self) -> str:
        """'2.1× (1.8–2.5)', or that it is the baseline."""
        if self.baseline:
            return "baseline"
        return self.multiplier.text() if self.multiplier else NOTHING


def standings(comparison: Comparison) -> tuple[Standing, ...]:
    """All contenders, the lowest cost first; those that finished nothing are last."""
    base = Curve.of(comparison.named(comparison.baseline))
    found = [_standing(contender, comparison.baseline, base) for contender in comparison.contenders]
    return tuple(sorted(found, key=lambda standing: standing.bits))


def _standing(contender: Measured, baseline: str, base: Curve) -> Standing:
    is_base = contender.name == baseline
    if not contender.shares:
        reasons = [outcome.failed for outcome in (*contender.outcomes, *contender.sweep) if outcome.failed]
        why = reasons[0] if reasons else "no job was finished"
        return Standing(contender, is_base, 0.0, 0, math.inf, (math.inf, math.inf), None, why)
    share = contender.shares[-1]
    outcomes = contender.at(share)
    rungs = [np.array([outcome.nats for outcome in contender.at(each)]) for each in contender.shares]
    sizes = np.array(outcomes[0].bytes)
    bits = float(np.mean([outcome.bits_per_byte for outcome in outcomes]))
    low, high = bands(rungs, sizes)[-1].tolist()
    times = None if is_base else multiplier(Curve.of(contender), base)
    return Standing(contender, is_base, share, len(outcomes), bits, (low, high), times)


def fraction(share: float) -> str:
    """A share of the budget as a person writes it: 1/27, 1."""
    return str(Fraction(share).limit_denominator(1000))


def flops_text(flops: float) -> str:
    """1.02e15 → '1.02e15'; nothing for what multiplies nothing."""
    return f"{flops:.3g}".replace("e+", "e") if flops else "0"


def rate_text(rate: float | None) -> str:
    """A learning rate."""
    return NOTHING if rate is None else f"{rate:.2g}"


def baseline_of(found: Sequence[Standing]) -> Standing:
    """The baseline's standing."""
    return next(standing for standing in found if standing.baseline)
