"""How the contenders of a comparison rank at the end of their budget, best first."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.compare.multiplier import Multiplier, multiplier
from weft.compare.results import Comparison, Curve, Result
from weft.evaluate.bootstrap import bands

NOTHING = "–"


@dataclass(frozen=True)
class Ranked:
    """A contender at the largest share of the budget that it finished, over all seeds.

    `bits` per byte has the bounds of a 95 % interval; they are infinite where nothing was finished, and `failed` says
    why. There is no `multiplier` for the baseline, nor where one of the two multiplies nothing.
    """

    result: Result
    baseline: bool
    share: float = 0.0
    seeds: int = 0
    bits: float = math.inf
    bounds: tuple[float, float] = (math.inf, math.inf)
    multiplier: Multiplier | None = None
    failed: str = ""

    @property
    def name(self) -> str:
        """The contender's."""
        return self.result.name

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
        return float(np.mean([getattr(outcome, field) for outcome in self.result.at(self.share)]))

    @property
    def sample(self) -> str:
        """What it writes at the end."""
        return next((outcome.sample for outcome in self.result.at(self.share) if outcome.sample), "")

    @property
    def differs(self) -> str:
        """Which recipe it is, where it has another name, and in what it differs; in an ablation the grid tells that."""
        if self.result.levels is not None:
            return ""
        changes = [f"{key}={value}" for key, value in (self.result.changes or {}).items()]
        return " ".join([*([self.result.recipe] if self.result.recipe != self.name else []), *changes])

    def record(self) -> dict[str, Any]:
        """The same as values."""
        if not self.finished:
            return {"contender": self.name, "failed": self.failed}
        read = ("value", "low", "high", "loss", "beyond", "at_full")
        return {
            "contender": self.name,
            "baseline": self.baseline,
            **{field: self.mean(field) for field in ("parameters", "tokens", "flops", "seconds")},
            "seeds": self.seeds,
            "bits_per_byte": self.bits,
            "low": self.bounds[0],
            "high": self.bounds[1],
            "learning_rate": self.result.rate,
            "multiplier": self.multiplier and {field: getattr(self.multiplier, field) for field in read},
            "sample": self.sample,
        }

    def bits_text(self) -> str:
        """'1.715 ±0.012', or that it failed."""
        return f"{self.bits:.3f} ±{(self.bounds[1] - self.bounds[0]) / 2:.3f}" if self.finished else "failed"

    def multiplier_text(self) -> str:
        """'2.1× (1.8–2.5)', or that it is the baseline."""
        return "baseline" if self.baseline else self.multiplier.text() if self.multiplier else NOTHING


def ranking(comparison: Comparison) -> tuple[Ranked, ...]:
    """All contenders, the lowest cost first; those that finished nothing are last."""
    base = Curve.of(next(each for each in comparison.contenders if each.name == comparison.baseline))
    found = [_ranked(each, each.name == comparison.baseline, base) for each in comparison.contenders]
    return tuple(sorted(found, key=lambda ranked: ranked.bits))


def _ranked(result: Result, is_base: bool, base: Curve) -> Ranked:
    if not result.shares:
        reasons = [outcome.failed for outcome in (*result.outcomes, *result.sweep) if outcome.failed]
        return Ranked(result, is_base, failed=(reasons or ["no job was finished"])[0])
    share = result.shares[-1]
    outcomes = result.at(share)
    bits = float(np.mean([outcome.bits_per_byte for outcome in outcomes]))
    rungs = [np.array([outcome.nats for outcome in result.at(each)]) for each in result.shares]
    low, high = bands(rungs, np.array(outcomes[0].bytes))[-1].tolist()
    times = None if is_base else multiplier(Curve.of(result), base)
    return Ranked(result, is_base, share, len(outcomes), bits, (low, high), times)


def flops_text(flops: float) -> str:
    """1.02e15 → '1.02e15'; nothing for what multiplies nothing."""
    return f"{flops:.3g}".replace("e+", "e") if flops else "0"
