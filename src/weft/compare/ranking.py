"""Rank the contenders of a comparison, in numbers and in sentences, and compute main effects.

A main effect is the change of the loss by one setting, averaged over the others. Two contenders that differ in one
setting alone are a pair. In a full grid, a setting has a pair for every combination of the others, and the mean over
them is the main effect of a factorial design (Box, Hunter & Hunter 2005, ch. 5). If one setting is varied at a time,
the only pair is with the base.
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
MIN_SELECTED = 4  # a note on selection bias appears from this many trained contenders on


@dataclass(frozen=True)
class Ranked:
    """Contender at the largest share of the budget that it finished, over all seeds."""

    result: Result
    baseline: bool
    share: float = 0.0
    seeds: int = 0
    bits: float = math.inf  # per byte; infinite if it finished nothing
    bounds: tuple[float, float] = (math.inf, math.inf)  # 95 % interval of `bits`
    multiplier: Multiplier | None = None  # none of the baseline and of a pair with an n-gram model
    failed: str = ""  # why it finished nothing

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def finished(self) -> bool:
        return math.isfinite(self.bits)

    @property
    def is_ngram(self) -> bool:
        """Whether it is counted instead of trained, and so takes no FLOPs."""
        return self.finished and not self.mean("flops")

    def mean(self, field: str) -> float:
        """Return the mean over seeds of a field of the outcomes at the largest share."""
        return float(np.mean([getattr(outcome, field) for outcome in self.result.at(self.share)]))

    @property
    def sample(self) -> str:
        return next((outcome.sample for outcome in self.result.at(self.share) if outcome.sample), "")

    @property
    def differs(self) -> str:
        """Recipe, if that is not its name, and changes; empty in an ablation, where the grid shows them."""
        if self.result.levels is not None:
            return ""
        changes = [f"{key}={value}" for key, value in (self.result.changes or {}).items()]
        return " ".join([*([self.result.recipe] if self.result.recipe != self.name else []), *changes])

    def record(self) -> dict[str, Any]:
        if not self.finished:
            return {"contender": self.name, "failed": self.failed}
        fields = ("value", "low", "high", "loss", "beyond", "at_full")
        return {
            "contender": self.name,
            "baseline": self.baseline,
            **{field: self.mean(field) for field in ("parameters", "tokens", "flops", "seconds")},
            "seeds": self.seeds,
            "bits_per_byte": self.bits,
            **dict(zip(("low", "high"), self.bounds, strict=True)),
            "learning_rate": self.result.rate,
            "multiplier": self.multiplier and {field: getattr(self.multiplier, field) for field in fields},
            "sample": self.sample,
        }

    def bits_text(self) -> str:
        """Format the bits per byte: '1.715 ±0.012', or 'failed'."""
        return f"{self.bits:.3f} ±{(self.bounds[1] - self.bounds[0]) / 2:.3f}" if self.finished else "failed"

    def multiplier_text(self) -> str:
        """Format the multiplier: '2.1× (1.8–2.5)', or 'baseline'."""
        return "baseline" if self.baseline else self.multiplier.text() if self.multiplier else NOTHING


def ranking(comparison: Comparison) -> tuple[Ranked, ...]:
    """Return all contenders, lowest bits per byte first; those that finished nothing are last."""
    base = Curve.of(next(result for result in comparison.contenders if result.name == comparison.baseline))
    contenders = [_ranked(result, result.name == comparison.baseline, base) for result in comparison.contenders]
    return tuple(sorted(contenders, key=lambda ranked: ranked.bits))


def _ranked(result: Result, is_base: bool, base: Curve) -> Ranked:
    if not result.shares:
        reasons = [outcome.failed for outcome in (*result.outcomes, *result.sweep) if outcome.failed]
        return Ranked(result, is_base, failed=(reasons or ["no job was finished"])[0])
    share = result.shares[-1]
    outcomes = result.at(share)
    bits = float(np.mean([outcome.bits_per_byte for outcome in outcomes]))
    rungs = [np.array([outcome.nats for outcome in result.at(rung)]) for rung in result.shares]
    low, high = bands(rungs, np.array(outcomes[0].bytes))[-1].tolist()
    times = None if is_base else multiplier(Curve.of(result), base)
    return Ranked(result, is_base, share, seeds=len(outcomes), bits=bits, bounds=(low, high), multiplier=times)


def flops_text(flops: float) -> str:
    """Format FLOPs: '1.02e15', '0'."""
    return f"{flops:.3g}".replace("e+", "e") if flops else "0"


@dataclass(frozen=True)
class Effect:
    """Change in bits per byte from the `base` value of a setting to another (negative: better), with its interval."""

    setting: str
    value: str
    base: str
    difference: float
    low: float
    high: float
    pairs: int  # that the mean is over
    planned: int  # pairs, of which those with a failed contender are missing

    @property
    def name(self) -> str:
        """Name such as 'placement: post → pre', from the last word of the key; 'position' for position.kind."""
        return f"{self.setting.removesuffix('.kind').rpartition('.')[2]}: {self.base} → {self.value}"


def main_effects(
    results: Sequence[Result], varied: Mapping[str, tuple[str, ...]], *, draws: int = DRAWS, seed: int = 0
) -> list[Effect]:
    """Return the effect of each value of each setting against its first value, at the largest finished share.

    A value without a complete pair is left out. Sections are drawn jointly for all contenders, seeds separately: equal
    seeds give two architectures the same batches, which correlates their losses slightly at most, and estimating that
    correlation would take many more than three seeds. If it is positive, the interval is conservative.
    """
    share = max((share for result in results for share in result.shares), default=0.0)
    levelled = [(result.levels, result) for result in results if result.levels is not None]
    planned = {tuple(levels.get(key, values[0]) for key, values in varied.items()): r for levels, r in levelled}
    done = {levels: result.at(share) for levels, result in planned.items() if result.at(share)}
    if not done:
        return []
    sizes = np.array(next(iter(done.values()))[0].bytes)
    cells = [np.array([outcome.nats for outcome in outcomes]) for outcomes in done.values()]  # (seeds, sections) each
    drawn = resample([cells], sizes, draws, seed=seed)[0]  # (draws, cells)
    means = np.array([nats.mean(axis=0).sum() / np.log(2) / sizes.sum() for nats in cells])
    columns = {levels: column for column, levels in enumerate(done)}

    effects = []
    for position, (setting, values) in enumerate(varied.items()):
        base, *others = values
        for value in others:
            # cells with the base value, each with the cell that differs in this setting alone
            bases = [levels for levels in planned if levels[position] == base]
            changed = [(levels, (*levels[:position], value, *levels[position + 1 :])) for levels in bases]
            all_pairs = [(levels, other) for levels, other in changed if other in planned]
            pairs = [(columns[a], columns[b]) for a, b in all_pairs if a in columns and b in columns]
            if not pairs:
                continue
            before, after = np.array(pairs).T
            difference = float((means[after] - means[before]).mean())
            low, high = ends((drawn[:, after] - drawn[:, before]).mean(axis=1))
            counts = {"pairs": len(pairs), "planned": len(all_pairs)}
            effects.append(Effect(setting, value, base, difference=difference, low=low, high=high, **counts))
    return effects


def result(contenders: Sequence[Ranked]) -> str:
    """Say which contender is best, by how much, and against what."""
    done = [ranked for ranked in contenders if ranked.finished]
    if not done:
        return "No contender finished a job, so there is nothing to compare."
    best, base = done[0], next(ranked for ranked in contenders if ranked.baseline)
    if not base.finished:
        return f"The baseline {base.name} finished no job; the best of the others, {_named(best)}, has no multiplier."
    if len(done) == 1:
        return f"{_named(best)} is the only contender that finished."
    sentences, rival = [f"{_named(best)} {_against(best, base)}. {base.name} ends at {base.bits:.3f}."], best
    if best.baseline:
        rival = done[1]
        sentences = [f"No contender beats the baseline, {_named(best)}."]
        sentences.append(f"The next best, {_named(rival)}, {_against(rival, base)}.")
    also = [_named(ranked) for ranked in done if ranked not in (best, rival) and _wins(ranked, base)]
    if also:
        sentences.append(f"Also better than {base.name}: {', '.join(also)}.")
    counted_only = [ranked for ranked in done if ranked.is_ngram and ranked not in (best, base, rival)]
    sentences += [f"{r.name}, which is counted instead of trained, ends at {r.bits:.3f}." for r in counted_only]
    return " ".join(sentences)


def _wins(ranked: Ranked, base: Ranked) -> bool:
    """Return whether a trained contender is better than the baseline by more than the intervals."""
    times = ranked.multiplier
    if ranked.is_ngram or ranked.bits >= base.bits:
        return False
    if times is None:
        return ranked.bounds[1] < base.bounds[0]
    return times.beyond == "above" or (times.beyond is None and not times.low <= 1)


def _named(ranked: Ranked) -> str:
    return f"{ranked.name} ({ranked.bits:.3f} bits per byte)"


def _against(ranked: Ranked, base: Ranked) -> str:
    """Say how the compute that a contender needs for its loss relates to the baseline's."""
    name, times = base.name, ranked.multiplier
    if ranked.is_ngram:
        return f"is counted instead of trained, so it has no multiplier against {name}"
    if base.is_ngram:
        return f"has no multiplier, because the baseline {name} is counted instead of trained"
    if times is None:
        better = base.bits - ranked.bits
        side = "better" if better > 0 else "worse"
        apart = ranked.bounds[1] < base.bounds[0] or base.bounds[1] < ranked.bounds[0]
        sure = "" if apart else ", but their intervals overlap"
        return f"is {abs(better):.3f} bits per byte {side} than {name}{sure}; curves of one point have no multiplier"
    value, inverse = factor_text(times.value), factor_text(1 / times.value)
    bounds = bounds_text(times.low, times.high)
    if times.beyond is not None:
        return TEXTS[times.beyond].format(name=name, value=value, inverse=inverse)
    if times.low <= 1 <= times.high:
        return TEXTS["equal"].format(name=name, value=value, bounds=bounds)
    if times.value > 1:
        return f"needs {value} times less compute than {name} for the same loss ({bounds})"
    around = bounds_text(*(1 / end if end else math.inf for end in (times.high, times.low)))
    return f"needs {inverse} times the compute of {name} for the same loss ({around})"


def method(comparison: Comparison, contenders: Sequence[Ranked]) -> list[str]:
    """Return the paragraphs on the method, with warnings and the comparison's notes."""
    trained = [ranked for ranked in contenders if ranked.finished and not ranked.is_ngram]
    notes = []
    if trained:
        longest = max((ranked.result for ranked in trained), key=lambda result: len(result.shares))
        seeds = counted(max(ranked.seeds for ranked in trained), "seed")
        shares = TEXTS["shares" if len(longest.shares) > 1 else "share"]
        notes += [shares.format(shares=", ".join(map(fraction, longest.shares)), seeds=seeds), TEXTS["flops"]]
    notes += [TEXTS[name] for name in ("bits", "interval", "difference")]
    if any(ranked.multiplier for ranked in contenders):
        notes.append(TEXTS["multiplier"])
    if any(ranked.is_ngram for ranked in contenders):
        notes.append(TEXTS["ngram"])
    if len(trained) >= MIN_SELECTED:
        notes.append(TEXTS["selection"].format(count=len(trained)))
    return [*notes, *warnings(contenders), *comparison.notes]


def warnings(contenders: Sequence[Ranked]) -> list[str]:
    """Return a sentence per limitation of a contender's result: unfinished shares, a rate at the sweep's edge."""
    largest = max(ranked.share for ranked in contenders)
    sentences = []
    for ranked in contenders:
        if not ranked.finished:
            sentences.append(f"{ranked.name} finished nothing: {ranked.failed}")
            continue
        if ranked.share < largest:
            part = f"{fraction(ranked.share)} of the budget, where others have {fraction(largest)}"
            sentences.append(f"{ranked.name} is shown at {part}: its larger runs did not finish.")
        rates = sorted({outcome.lr for outcome in ranked.result.sweep if outcome.lr})
        if len(rates) > 1 and ranked.result.rate in (rates[0], rates[-1]):
            side = "smallest" if ranked.result.rate == rates[0] else "largest"
            sentences.append(TEXTS["edge"].format(name=ranked.name, side=side))
    return sentences
