"""What came out of a comparison, in sentences."""

import math
from collections.abc import Sequence

from weft.compare.jobs import Comparison, fraction
from weft.compare.multiplier import bounds_text, factor_text
from weft.compare.ranking import Ranked
from weft.errors import counted

MIN_LUCKY = 4  # trained contenders from which on the best one is also the luckiest


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
        notes += [
            f"Each contender is trained at these shares of the budget: {', '.join(map(fraction, first.shares))}."
            " Each is a training run of its own, whose schedule ends there, with"
            f" {counted(max(ranked.seeds for ranked in trained), 'seed')}.",
            "FLOPs are those of the model's matrix products in training, forward and backward, every query against all"
            " keys; the search for a learning rate and evaluations are not in the table. Seconds are those of this"
            " machine, and other jobs may have run beside.",
        ]
    notes += [
        "Bits per byte is the cost of the held-out text: the same bytes for every contender, whatever its tokenizer.",
        "An interval holds 95 % of bootstrap draws. Sections of the held-out text are drawn with replacement, the same"
        " for all contenders, since what is hard is hard for all; how far other seeds might be from those that were"
        " trained is drawn from Student's t, for each contender by itself; with one seed it is left out.",
        "So the bits per byte of two contenders can differ for certain though their intervals overlap; the interval of"
        " the multiplier is that of their difference.",
        "The multiplier is how many times a contender's FLOPs the baseline needs for the same loss. It is read at the"
        " lowest loss that both reach; curves are interpolated between shares of the budget and never continued beyond"
        " them.",
    ]
    if any(ranked.counted for ranked in found):
        notes.append(
            "An n-gram model is counted: it multiplies nothing, so it is a level on the chart of FLOPs and has no"
            " multiplier."
        )
    if len(trained) >= MIN_LUCKY:
        notes.append(
            f"The best of {len(trained)} contenders was picked because it was best, so it is likely to be a little"
            " worse than it looks; its interval does not account for that."
        )
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
            told.append(
                f"{ranked.name} is shown at {fraction(ranked.share)} of the budget, where others have"
                f" {fraction(largest)}: more did not finish."
            )
        rates = sorted({outcome.lr for outcome in ranked.result.sweep if outcome.lr})
        if len(rates) > 1 and ranked.result.rate in (rates[0], rates[-1]):
            side = "smallest" if ranked.result.rate == rates[0] else "largest"
            told.append(
                f"The rate of {ranked.name} is the {side} that was tried: a better one may lie beyond, so it may be"
                " better than it looks."
            )
    return told
