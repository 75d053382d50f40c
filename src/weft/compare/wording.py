"""What came out of a comparison, in sentences."""

import math
from collections.abc import Sequence

from weft.compare.multiplier import Multiplier
from weft.compare.results import Comparison
from weft.compare.standings import Standing, baseline_of, fraction

MANY = 4  # trained contenders from which on the best one is also the luckiest


def result(found: Sequence[Standing]) -> str:
    """Who is best, by how much, and against what."""
    done = [standing for standing in found if standing.finished]
    if not done:
        return "No contender finished a job, so there is nothing to compare."
    best, base = done[0], baseline_of(found)
    if not base.finished:
        return f"The baseline {base.name} finished no job; the best of the others, {_named(best)}, has no multiplier."
    if len(done) == 1:
        return f"{_named(best)} is the only contender that finished."
    if best.baseline:
        rival = done[1]
        told = (
            f"No contender beats the baseline, {_named(best)}. The next best, {_named(rival)}, {_against(rival, base)}."
        )
    else:
        told = f"{_named(best)} {_against(best, base)}. {base.name} ends at {base.bits:.3f}."
    counted = [standing for standing in done if standing.counted and standing not in (best, base)]
    if best.baseline:
        counted = [standing for standing in counted if standing is not done[1]]
    for standing in counted:
        told += f" {standing.name}, which is counted and multiplies nothing, ends at {standing.bits:.3f}."
    return told


def _named(standing: Standing) -> str:
    return f"{standing.name} ({standing.bits:.3f} bits per byte)"


def _against(standing: Standing, base: Standing) -> str:
    """What a contender needs for the loss it ends with, in the baseline's operations."""
    if standing.counted:
        return f"is counted, not trained: it multiplies nothing, so no multiplier against {base.name} exists"
    if base.counted:
        return f"has no multiplier, because the baseline {base.name} is counted and multiplies nothing"
    times = standing.multiplier
    if times is None:
        better = base.bits - standing.bits
        return (
            f"is {abs(better):.3f} bits per byte {'better' if better > 0 else 'worse'} than {base.name}; curves of one"
            " point have no multiplier"
        )
    if times.beyond == "above":
        return (
            f"is better with its smallest share of the budget than {base.name} with all of it: {base.name} needs more"
            f" than {_number(times.value)} times the operations for the same loss, which is beyond the measured range"
        )
    if times.beyond == "below":
        return (
            f"is worse with the whole budget than {base.name} with its smallest share of it: it needs more than"
            f" {_number(1 / times.value)} times the operations of {base.name} for the same loss, which is beyond the"
            " measured range"
        )
    if times.low <= 1 <= times.high:
        return (
            f"needs about as many operations as {base.name} for the same loss: the multiplier is"
            f" {_number(times.value)}, and its interval, {_bounds(times.low, times.high)}, includes 1"
        )
    if times.value > 1:
        return (
            f"needs {_number(times.value)} times fewer operations than {base.name} for the same loss"
            f" ({_bounds(times.low, times.high)})"
        )
    return (
        f"needs {_number(1 / times.value)} times as many operations as {base.name} for the same loss"
        f" ({_bounds(*_inverse(times))})"
    )


def _inverse(times: Multiplier) -> tuple[float, float]:
    return 1 / times.high if times.high else math.inf, 1 / times.low if times.low else math.inf


def _bounds(low: float, high: float) -> str:
    """An interval; an end outside of what was measured is said in words."""
    if math.isfinite(high) and low > 0:
        return f"{_number(low)}–{_number(high)}"
    if math.isfinite(high):
        return f"at most {_number(high)}"
    return f"at least {_number(low)}" if low > 0 else "beyond the measured range on both sides"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:#.2g}"


def method(comparison: Comparison, found: Sequence[Standing]) -> list[str]:
    """How it was measured, from what is there, and what the comparison notes besides."""
    trained = [standing for standing in found if standing.finished and not standing.counted]
    notes = []
    if trained:
        first = max(trained, key=lambda standing: len(standing.contender.shares)).contender
        shares = ", ".join(map(fraction, first.shares))
        seeds = max(standing.seeds for standing in trained)
        notes.append(
            f"Each contender is trained at these shares of the budget: {shares}. Each is a training run of its own,"
            f" whose schedule ends there, with {seeds} seed{'s' * (seeds > 1)}."
        )
        notes.append(
            "FLOPs are those of the model's matrix products in training, forward and backward, every query against all"
            " keys; the search for a learning rate and evaluations are not in the table. Seconds are those of this"
            " machine, and other jobs may have run beside."
        )
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
    if any(standing.counted for standing in found):
        notes.append(
            "An n-gram model is counted: it multiplies nothing, so it is a level on the chart of FLOPs and has no"
            " multiplier."
        )
    if len(trained) >= MANY:
        notes.append(
            f"The best of {len(trained)} contenders was picked because it was best, so it is likely to be a little"
            " worse than it looks; its interval does not account for that."
        )
    return [*notes, *warnings(found), *comparison.notes]


def warnings(found: Sequence[Standing]) -> list[str]:
    """What makes a contender's numbers less than they seem: shares that did not finish, and rates at an edge."""
    largest = max(standing.share for standing in found)
    told = []
    for standing in found:
        if not standing.finished:
            told.append(f"{standing.name} finished nothing: {standing.failed}")
            continue
        if standing.share < largest:
            told.append(
                f"{standing.name} is shown at {fraction(standing.share)} of the budget, where others have"
                f" {fraction(largest)}: more did not finish."
            )
        rates = sorted({outcome.lr for outcome in standing.contender.sweep if outcome.lr})
        if len(rates) > 1 and standing.contender.rate in (rates[0], rates[-1]):
            side = "smallest" if standing.contender.rate == rates[0] else "largest"
            told.append(
                f"The rate of {standing.name} is the {side} that was tried: a better one may lie beyond, so it may be"
                " better than it looks."
            )
    return told
