"""How the contenders of a comparison rank at the end of their budget, best first; and the main effects of an ablation.

A main effect is what one setting does to the loss, whatever the others are. Two contenders that differ in one setting
alone are a pair. In a full grid a setting has a pair for every combination of the others, and the mean over them is the
main effect of a factorial design (Box, Hunter & Hunter 2005, ch. 5); when one setting is varied at a time, there is the
one pair with the base.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.compare.jobs import Comparison, Result
from weft.compare.multiplier import Curve, Multiplier, multiplier
from weft.evaluate.bootstrap import DRAWS, bands, ends, resample

NOTHING = "–"
Levels = tuple[str, ...]


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


# ---- main effects


@dataclass(frozen=True)
class Effect:
    """By how many bits per byte a `value` of a setting is worse than its `base` (negative: better), with its interval.

    It is the mean over so many `pairs`, of the `planned` ones: a contender that failed takes its pairs away.
    """

    setting: str
    value: str
    base: str
    difference: float
    low: float
    high: float
    pairs: int
    planned: int


def main_effects(
    results: Sequence[Result], varied: Mapping[str, tuple[str, ...]], draws: int = DRAWS, seed: int = 0
) -> list[Effect]:
    """The effect of each value of each setting against the setting's first, at the largest share that anybody finished.

    A value that has no pair left is left out. Sections are drawn once for all contenders, seeds for each contender by
    itself: that one seed gives two architectures the same batches makes their losses a little alike at most, and to
    claim more than that would need many more seeds than three. If they are alike, the interval is on the safe side.
    """
    share = max((share for result in results for share in result.shares), default=0.0)
    planned = {_levels(result, varied): result for result in results if result.levels is not None}
    done = {levels: result.at(share) for levels, result in planned.items() if result.at(share)}
    if not done:
        return []
    sizes = np.array(next(iter(done.values()))[0].bytes)
    cells = [np.array([outcome.nats for outcome in outcomes]) for outcomes in done.values()]  # (seeds, sections) each
    drawn = resample([cells], sizes, draws, seed)[0]  # (draws, cells)
    means = np.array([nats.mean(axis=0).sum() / np.log(2) / sizes.sum() for nats in cells])
    columns = {levels: column for column, levels in enumerate(done)}

    found = []
    for place, (setting, values) in enumerate(varied.items()):
        base, *others = values
        for value in others:
            all_pairs = _pairs(planned, place, base, value)
            pairs = [(columns[a], columns[b]) for a, b in all_pairs if a in columns and b in columns]
            if not pairs:
                continue
            before, after = np.array(pairs).T
            difference = float((means[after] - means[before]).mean())
            low, high = ends((drawn[:, after] - drawn[:, before]).mean(axis=1))
            found.append(Effect(setting, value, base, difference, low, high, len(pairs), len(all_pairs)))
    return found


def _levels(result: Result, varied: Mapping[str, tuple[str, ...]]) -> Levels:
    """Which value it has of each varied setting; the base's where it doesn't say."""
    levels = result.levels or {}
    return tuple(levels.get(setting, values[0]) for setting, values in varied.items())


def _pairs(cells: Mapping[Levels, object], place: int, base: str, value: str) -> list[tuple[Levels, Levels]]:
    """The cells with the base's value and those with the other that are alike in everything else."""
    changed = ((levels, (*levels[:place], value, *levels[place + 1 :])) for levels in cells if levels[place] == base)
    return [(levels, other) for levels, other in changed if other in cells]
