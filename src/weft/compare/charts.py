"""The charts of a comparison: loss against what it took, multipliers, the sweep of learning rates, main effects."""

from collections.abc import Callable, Sequence

import numpy as np

from weft.compare.effects import Effect
from weft.compare.jobs import fraction
from weft.compare.ranking import Ranked
from weft.compare.results import Axis as Amount
from weft.compare.results import Outcome
from weft.costs.units import plain, short
from weft.figures.charts import Panels, panel
from weft.figures.plot import LOOKS, Axis, Look, Plot, Point, Series, Whisker, scientific, whiskers

AMOUNTS: dict[Amount, tuple[str, Callable[[float], str]]] = {  # what it is called, and how a number of it is written
    "flops": ("FLOPs", scientific),
    "tokens": ("tokens", short),
    "seconds": ("seconds", plain),
}
BITS = Axis("bits per byte", log=True, named=lambda tick: f"{tick:.4g}")
BASELINE, FAINT = Look("ink", "o"), Look("soft", ".", width=0.9)
SMALL = (320, 240)


def looks(found: Sequence[Ranked]) -> dict[str, Look]:
    """How each contender is drawn: the baseline in ink, the best four others in colour, what is left in grey."""
    others = [ranked.name for ranked in found if not ranked.baseline and ranked.finished]
    chosen = {name: LOOKS[number] if number < len(LOOKS) else FAINT for number, name in enumerate(others)}
    return chosen | {ranked.name: BASELINE for ranked in found if ranked.baseline}


# ---- loss against what it took


def loss_charts(found: Sequence[Ranked]) -> list[Panels]:
    """Bits per byte against FLOPs, tokens and seconds."""
    about = (
        "A mark is the mean of all seeds at one share of the budget, and the band around the line goes from the best"
        " seed to the worst. Faint lines are evaluations during training, of the first seed. Lower is better; further"
        " left is cheaper."
    )
    done = [ranked for ranked in found if ranked.finished]
    chosen = looks(done)
    others = sum(look is FAINT for look in chosen.values())
    charts = []
    for amount, (what, named) in AMOUNTS.items():
        if any(ranked.mean(amount) > 0 for ranked in done):
            series = [each for ranked in done for each in _loss_series(ranked, amount, chosen[ranked.name])]
            series = sorted(series, key=lambda each: bool(each.name))  # what has a name is drawn on top
            series += [Series(f"{others} others", look=FAINT)] if others else []
            height = 330 + 17 * sum(len(each.name) > 30 for each in series)  # a line each under the title
            axis = Axis(f"{what} in training", log=True, named=named, pad=0.06)
            plot = Plot(f"Bits per byte against {what}", series, axis, BITS, size=(480, height))
            charts.append(panel(f"loss-{amount}", about, plot))
    return charts


def _loss_series(ranked: Ranked, amount: Amount, look: Look) -> list[Series]:
    """A line through the shares of the budget; of what has no place on the axis, a level."""
    rungs = [ranked.result.at(share) for share in ranked.result.shares]
    amounts = [float(np.mean([getattr(outcome, amount) for outcome in rung])) for rung in rungs]
    bits = [[outcome.bits_per_byte for outcome in rung] for rung in rungs]
    if not max(amounts):
        return [Series(ranked.name, look=look._replace(marker=""), level=ranked.bits)]
    means = [(spent, float(np.mean(seeds))) for spent, seeds in zip(amounts, bits, strict=True)]
    if look is FAINT:
        return [Series(points=means, look=look)]
    behind = [Series(points=_progress(rung[0], amount), look=Look(look.colour), background=True) for rung in rungs]
    return [*behind, Series(ranked.name, means, look, [(min(seeds), max(seeds)) for seeds in bits])]


def _progress(outcome: Outcome, amount: Amount) -> list[Point]:
    """The evaluations during training: operations and seconds are spent evenly over tokens."""
    whole = getattr(outcome, amount)
    each = whole / outcome.tokens if outcome.tokens else 0.0
    points = [(tokens * each, bits) for tokens, bits in outcome.progress if 0 < tokens < outcome.tokens]
    return [*points, (whole, outcome.bits_per_byte)]


# ---- multipliers and main effects


def multiplier_chart(found: Sequence[Ranked]) -> Panels | None:
    """The multiplier of each contender that has one; None where none has."""
    chosen = looks(found)
    rows = [
        Whisker(f"{times.text()}  {each.name}", times.value, times.low, times.high, chosen[each.name], times.beyond)
        for each in found
        if (times := each.multiplier)
    ]
    if not rows:
        return None
    base = next(ranked.name for ranked in found if ranked.baseline)
    about = (
        f"How many times a contender's FLOPs {base} needs for the same loss, the lowest that both reach. Right of 1× is"
        " more efficient. The whisker is the 95 % interval; an arrow stands at the end of what was measured: the value"
        " lies beyond."
    )
    axis = Axis("times as many FLOPs for the baseline", log=True, named=lambda tick: f"{tick:g}×")
    return panel("multipliers", about, whiskers(f"Compute multiplier against {base}", rows, axis, 1.0))


def effects_chart(effects: Sequence[Effect]) -> Panels | None:
    """The main effect of every value of a setting against its base."""
    if not effects:
        return None
    about = (
        "How bits per byte change with one setting, on average over all others that were compared with both of its"
        " values. Left of zero, a negative number, is better than the base. The whisker is the 95 % interval."
    )
    rows = [
        Whisker(f"{each.difference:+.3f}  {effect_name(each)}", each.difference, each.low, each.high, _side(each))
        for each in effects
    ]
    axis = Axis("← better · change in bits per byte · worse →", named=lambda tick: f"{tick:+g}" if tick else "0")
    return panel("effects", about, whiskers("Main effects", rows, axis, 0.0))


def _side(effect: Effect) -> Look:
    """Better, worse, or neither as far as the interval tells."""
    unclear = effect.low <= 0 <= effect.high
    return Look("soft", "o") if unclear else LOOKS[0] if effect.difference < 0 else LOOKS[1]


def effect_name(effect: Effect) -> str:
    """'placement: post → pre', by the last word of the key; 'position' for position.kind."""
    setting = effect.setting.removesuffix(".kind").rpartition(".")[2]
    return f"{setting}: {effect.base} → {effect.value}"


# ---- the sweep


def sweep_charts(found: Sequence[Ranked]) -> Panels | None:
    """Loss against learning rate, a small chart for each contender that has a sweep; None where none has."""
    about = (
        "A line is a round of the sweep, at one share of the budget; a ring is the rate that was chosen for it, and a"
        " cross at the top a run that failed."
    )
    plots = [_sweep_plot(ranked) for ranked in found if any(each.nats and each.lr for each in ranked.result.sweep)]
    return Panels("sweep", "Bits per byte against the learning rate", about, plots) if plots else None


def _sweep_plot(ranked: Ranked) -> Plot:
    result = ranked.result
    sweep = [outcome for outcome in result.sweep if outcome.lr]
    chosen = {(outcome.share, outcome.lr) for outcome in result.outcomes}
    series, rings = list[Series](), list[Point]()
    for number, share in enumerate(sorted({outcome.share for outcome in sweep if outcome.nats})):
        by_rate: dict[float, list[float]] = {}
        for outcome in sweep:
            if outcome.share == share and outcome.nats and outcome.lr:
                by_rate.setdefault(outcome.lr, []).append(outcome.bits_per_byte)
        points = [(rate, float(np.mean(bits))) for rate, bits in sorted(by_rate.items())]
        series.append(Series(fraction(share), points, LOOKS[number % len(LOOKS)]._replace(marker=".")))
        found = {(share, result.rate)} if share not in result.shares else chosen
        rings += [point for point in points if (share, point[0]) in found]
    top = max(bits for each in series for _, bits in each.points)
    failed = [(outcome.lr, 1.02 * top) for outcome in sweep if not outcome.nats and outcome.lr]
    series += [Series(points=rings, look=Look("ink", "ring", width=0))]
    series += [Series("failed", failed, Look("soft", "x", width=0))] if failed else []
    rates = Axis("learning rate", log=True, named=lambda tick: f"{tick:.2g}".replace("e-0", "e-"))
    return Plot(ranked.name, series, rates, BITS, size=SMALL)
