"""How the contenders of a comparison rank at the end of their budget, in numbers and in sentences; and main effects.

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

from weft.compare.jobs import Comparison, Result, fraction
from weft.compare.multiplier import Curve, Multiplier, bounds_text, factor_text, multiplier
from weft.errors import counted
from weft.evaluate.bootstrap import DRAWS, bands, ends, resample
from weft.figures.prose import prose

TEXTS = prose(__file__)
NOTHING = "–"
MIN_LUCKY = 4  # trained contenders from which on the best one is also the luckiest


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
        return self.result.name

    @property
    def finished(self) -> bool:
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
        return next((outcome.sample for outcome in self.result.at(self.share) if outcome.sample), "")

    @property
    def differs(self) -> str:
        """Which recipe it is, where it has another name, and in what it differs; in an ablation the grid tells that."""
        if self.result.levels is not None:
            return ""
        changes = [f"{key}={value}" for key, value in (self.result.changes or {}).items()]
        return " ".join([*([self.result.recipe] if self.result.recipe != self.name else []), *changes])

    def record(self) -> dict[str, Any]:
        if not self.finished:
            return {"contender": self.name, "failed": self.failed}
        read = ("value", "low", "high", "loss", "beyond", "at_full")
        return {
            "contender": self.name,
            "baseline": self.baseline,
            **{field: self.mean(field) for field in ("parameters", "tokens", "flops", "seconds")},
            "seeds": self.seeds,
            "bits_per_byte": self.bits,
            **dict(zip(("low", "high"), self.bounds, strict=True)),
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
    """'1.02e15'; '0' for what multiplies nothing."""
    return f"{flops:.3g}".replace("e+", "e") if flops else "0"


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

    @property
    def name(self) -> str:
        """'placement: post → pre', by the last word of the key; 'position' for position.kind."""
        return f"{self.setting.removesuffix('.kind').rpartition('.')[2]}: {self.base} → {self.value}"


def main_effects(
    results: Sequence[Result], varied: Mapping[str, tuple[str, ...]], draws: int = DRAWS, seed: int = 0
) -> list[Effect]:
    """The effect of each value of each setting against the setting's first, at the largest share that anybody finished.

    A value that has no pair left is left out. Sections are drawn once for all contenders, seeds for each contender by
    itself: that one seed gives two architectures the same batches makes their losses a little alike at most, and to
    claim more than that would need many more seeds than three. If they are alike, the interval is on the safe side.
    """
    share = max((share for result in results for share in result.shares), default=0.0)
    planned = {
        tuple(result.levels.get(setting, values[0]) for setting, values in varied.items()): result
        for result in results
        if result.levels is not None
    }
    done = {levels: result.at(share) for levels, result in planned.items() if result.at(share)}
    if not done:
        return []
    sizes = np.array(next(iter(done.values()))[0].bytes)
    cells = [np.array([outcome.nats for outcome in outcomes]) for outcomes in done.values()]  # (seeds, sections) each
    drawn = resample([cells], sizes, draws, seed=seed)[0]  # (draws, cells)
    means = np.array([nats.mean(axis=0).sum() / np.log(2) / sizes.sum() for nats in cells])
    columns = {levels: column for column, levels in enumerate(done)}

    found = []
    for place, (setting, values) in enumerate(varied.items()):
        base, *others = values
        for value in others:
            # cells with the base's value, and those with the other that are alike in everything else
            bases = [levels for levels in planned if levels[place] == base]
            changed = [(levels, (*levels[:place], value, *levels[place + 1 :])) for levels in bases]
            all_pairs = [(levels, other) for levels, other in changed if other in planned]
            pairs = [(columns[a], columns[b]) for a, b in all_pairs if a in columns and b in columns]
            if not pairs:
                continue
            before, after = np.array(pairs).T
            difference = float((means[after] - means[before]).mean())
            low, high = ends((drawn[:, after] - drawn[:, before]).mean(axis=1))
            found.append(Effect(setting, value, base, difference, low, high, len(pairs), len(all_pairs)))
    return found


def result(found: Sequence[Ranked]) -> str:
    """Who is best, by how much, and against what."""
    done = [ranked for ranked in found if ranked.finished]
    if not done:
        return "No contender finished a job, so there is nothing to compare."
    best, base = done[0], next(ranked for ranked in found if ranked.baseline)
    if not base.finished:
        return f"The baseline {base.name} finished no job; the best of the others, {_named(best)}, has no multiplier."
    if len(done) == 1:
        return f"{_named(best)} is the only contender that finished."
    told, rival = [f"{_named(best)} {_against(best, base)}. {base.name} ends at {base.bits:.3f}."], best
    if best.baseline:
        rival = done[1]
        told = [f"No contender beats the baseline, {_named(best)}."]
        told.append(f"The next best, {_named(rival)}, {_against(rival, base)}.")
    told += [
        f"{ranked.name}, which is counted and multiplies nothing, ends at {ranked.bits:.3f}."
        for ranked in done
        if ranked.counted and ranked not in (best, base, rival)
    ]
    return " ".join(told)


def _named(ranked: Ranked) -> str:
    return f"{ranked.name} ({ranked.bits:.3f} bits per byte)"


def _against(ranked: Ranked, base: Ranked) -> str:
    """What a contender needs for the loss it ends with, in the baseline's operations."""
    name, times = base.name, ranked.multiplier
    if ranked.counted:
        return f"is counted, not trained: it multiplies nothing, so no multiplier against {name} exists"
    if base.counted:
        return f"has no multiplier, because the baseline {name} is counted and multiplies nothing"
    if times is None:
        better = base.bits - ranked.bits
        side = "better" if better > 0 else "worse"
        return f"is {abs(better):.3f} bits per byte {side} than {name}; curves of one point have no multiplier"
    value, bounds = factor_text(times.value), bounds_text(times.low, times.high)
    inverse = factor_text(1 / times.value)
    if times.beyond == "above":
        return (
            f"is better with its smallest share of the budget than {name} with all of it: {name} needs more than"
            f" {value} times the operations for the same loss, which is beyond the measured range"
        )
    if times.beyond == "below":
        return (
            f"is worse with the whole budget than {name} with its smallest share of it: it needs more than {inverse}"
            f" times the operations of {name} for the same loss, which is beyond the measured range"
        )
    if times.low <= 1 <= times.high:
        return (
            f"needs about as many operations as {name} for the same loss: the multiplier is {value}, and its interval,"
            f" {bounds}, includes 1"
        )
    if times.value > 1:
        return f"needs {value} times fewer operations than {name} for the same loss ({bounds})"
    around = bounds_text(*(1 / end if end else math.inf for end in (times.high, times.low)))
    return f"needs {inverse} times as many operations as {name} for the same loss ({around})"


def method(comparison: Comparison, found: Sequence[Ranked]) -> list[str]:
    """How it was measured, from what is there, and what the comparison notes besides."""
    trained = [ranked for ranked in found if ranked.finished and not ranked.counted]
    notes = []
    if trained:
        first = max((ranked.result for ranked in trained), key=lambda result: len(result.shares))
        seeds = counted(max(ranked.seeds for ranked in trained), "seed")
        notes += [
            TEXTS["shares"].format(shares=", ".join(map(fraction, first.shares)), seeds=seeds),
            TEXTS["flops"],
        ]
    notes += [
        "Bits per byte is the cost of the held-out text: the same bytes for every contender, whatever its tokenizer.",
        TEXTS["interval"],
        TEXTS["difference"],
        TEXTS["multiplier"],
    ]
    if any(ranked.counted for ranked in found):
        notes.append("An n-gram model is counted, and multiplies nothing: a level among FLOPs, without a multiplier.")
    if len(trained) >= MIN_LUCKY:
        picked = f"The best of {len(trained)} contenders was picked because it was best"
        notes.append(f"{picked}, so it is likely a little worse than it looks; its interval does not account for that.")
    return [*notes, *warnings(found), *comparison.notes]


def warnings(found: Sequence[Ranked]) -> list[str]:
    """What makes a contender's numbers less than they seem: shares that did not finish, and rates at an edge."""
    largest = max(ranked.share for ranked in found)
    told = []
    for ranked in found:
        if not ranked.finished:
            told.append(f"{ranked.name} finished nothing: {ranked.failed}")
            continue
        if ranked.share < largest:
            part = f"{fraction(ranked.share)} of the budget, where others have {fraction(largest)}"
            told.append(f"{ranked.name} is shown at {part}: more did not finish.")
        rates = sorted({outcome.lr for outcome in ranked.result.sweep if outcome.lr})
        if len(rates) > 1 and ranked.result.rate in (rates[0], rates[-1]):
            side = f"the {'smallest' if ranked.result.rate == rates[0] else 'largest'} that was tried"
            beyond = "a better one may lie beyond, so it may be better than it looks"
            told.append(f"The rate of {ranked.name} is {side}: {beyond}.")
    return told
