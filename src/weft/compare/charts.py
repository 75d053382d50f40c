"""The charts of a comparison: loss against what it took, multipliers, the sweep of learning rates, main effects."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from weft.compare.drawing import (
    BASELINE,
    FAINT,
    GREY,
    INK,
    OTHERS,
    Drawing,
    End,
    Look,
    Panels,
    Whisker,
    draw_whiskers,
    legend_height,
    log_axis,
    name_lines,
    padded,
    scientific,
    whisker_size,
)  # fmt: skip
from weft.compare.effects import Effect
from weft.compare.results import Axis, Outcome
from weft.compare.standings import Standing, fraction
from weft.costs.units import plain, short
from weft.figures.charts import grid

AXES: dict[Axis, tuple[str, Any]] = {  # what it is called, and how a number of it is written
    "flops": ("FLOPs", scientific),
    "tokens": ("tokens", short),
    "seconds": ("seconds", plain),
}
BITS = "bits per byte"


def looks(found: Sequence[Standing]) -> dict[str, Look]:
    """How each contender is drawn: the baseline in ink, the best four others in colour, what is left in grey."""
    others = [standing.name for standing in found if not standing.baseline and standing.finished]
    chosen = {name: OTHERS[number] if number < len(OTHERS) else FAINT for number, name in enumerate(others)}
    return chosen | {standing.name: BASELINE for standing in found if standing.baseline}


# ---- loss against what it took


def loss_charts(found: Sequence[Standing]) -> list[Drawing]:
    """Bits per byte against FLOPs, tokens and seconds."""
    done = [standing for standing in found if standing.finished]
    about = (
        "A mark is the mean of all seeds at one share of the budget, and the band around the line goes from the best"
        " seed to the worst. Faint lines are evaluations during training, of the first seed. Lower is better; further"
        " left is cheaper."
    )
    named = [name for name, look in looks(done).items() if not look.faint]
    drawings = []
    for axis, (what, _) in AXES.items():
        if any(standing.mean(axis) > 0 for standing in done):
            title = f"Bits per byte against {what}"
            size = (4.3, 3.3 + legend_height(named))
            drawings.append(Drawing(f"loss-{axis}", title, about, partial(_draw_loss, found=done, axis=axis), size))
    return drawings


def _draw_loss(axes: Any, found: Sequence[Standing], axis: Axis) -> None:
    chosen = looks(found)
    ends, levels, xs, ys = [], [], [], []
    for standing in reversed(found):  # the best on top
        look, order = chosen[standing.name], 2 if chosen[standing.name].faint else 3
        amounts, bits = _seeds(standing, axis)
        if not amounts:
            levels.append((standing, look))
            continue
        xs += amounts
        ys += [float(value) for seeds in bits for value in seeds]
        means = [float(np.mean(seeds)) for seeds in bits]
        style = {"color": look.colour, "linestyle": look.dash, "zorder": order}
        axes.plot(amounts, means, marker=look.marker, markersize=4, linewidth=0.9 if look.faint else 1.7, **style)
        if look.faint:
            continue
        worst, best = [max(seeds) for seeds in bits], [min(seeds) for seeds in bits]
        axes.fill_between(amounts, best, worst, color=look.colour, alpha=0.18, linewidth=0)
        for share in standing.contender.shares:
            axes.plot(*_progress(standing.contender.at(share)[0], axis), color=look.colour, linewidth=0.6, alpha=0.3)
        ends.append(End(amounts[-1], means[-1], standing.name, look))
    axes.set_xlim(padded(xs))
    axes.set_ylim(padded([*ys, *(standing.bits for standing, _ in levels)], above=0.12))
    for standing, look in levels:
        axes.axhline(standing.bits, color=look.colour, linestyle=look.dash, linewidth=1.4)
        ends.append(End(axes.get_xlim()[1], standing.bits, standing.name, look))
    what, named = AXES[axis]
    log_axis(axes.xaxis, f"{what} in training", named)
    log_axis(axes.yaxis, BITS, lambda tick: f"{tick:.4g}")
    order_of = [standing.name for standing in found]
    name_lines(axes, sorted(ends, key=lambda end: order_of.index(end.name)))
    if grey := sum(look.faint for look in chosen.values()):
        axes.text(0.99, 0.98, f"grey: {grey} others", transform=axes.transAxes, ha="right", va="top", fontsize=8.5)


def _seeds(standing: Standing, axis: Axis) -> tuple[list[float], list[list[float]]]:
    """The amounts of all rungs that have a place on the axis, and the bits per byte of every seed at each."""
    amounts, bits = [], []
    for share in standing.contender.shares:
        rung = standing.contender.at(share)
        amount = float(np.mean([getattr(outcome, axis) for outcome in rung]))
        if amount > 0:
            amounts.append(amount)
            bits.append([outcome.bits_per_byte for outcome in rung])
    return amounts, bits


def _progress(outcome: Outcome, axis: Axis) -> tuple[list[float], list[float]]:
    """The evaluations during training: operations and seconds are spent evenly over tokens."""
    each = getattr(outcome, axis) / outcome.tokens if outcome.tokens else 0.0
    points = [(tokens * each, bits) for tokens, bits in outcome.progress if 0 < tokens < outcome.tokens]
    points.append((getattr(outcome, axis), outcome.bits_per_byte))
    return [x for x, _ in points], [y for _, y in points]


# ---- multipliers


def multiplier_chart(found: Sequence[Standing]) -> Drawing | None:
    """The multiplier of each contender that has one; None where none has."""
    chosen = looks(found)
    rows = [
        Whisker(each.name, times.value, times.low, times.high, times.text(), chosen[each.name], times.beyond)
        for each in found
        if (times := each.multiplier)
    ]
    if not rows:
        return None
    base = next(standing.name for standing in found if standing.baseline)
    about = (
        f"How many times a contender's FLOPs {base} needs for the same loss, the lowest that both reach. Right of 1× is"
        " more efficient. The whisker is the 95 % interval; an arrow stands at the end of what was measured: the value"
        " lies beyond."
    )
    draw = partial(_draw_multipliers, rows=rows)
    return Drawing("multipliers", f"Compute multiplier against {base}", about, draw, whisker_size(rows))


def _draw_multipliers(axes: Any, rows: Sequence[Whisker]) -> None:
    reached = [bound for row in rows for bound in (row.value, row.low, row.high) if 0 < bound < math.inf]
    axes.set_xlim(padded([1.0, *reached], 0.12, 0.12))
    draw_whiskers(axes, rows, neutral=1.0)
    log_axis(axes.xaxis, "times as many FLOPs for the baseline", lambda tick: f"{tick:g}×", most=5, keep=1.0)
    axes.yaxis.grid(False)


# ---- the sweep


def sweep_charts(found: Sequence[Standing]) -> Panels | None:
    """Loss against learning rate, a small chart for each contender that has a sweep; None where none has."""
    about = (
        "A line is a round of the sweep, at one share of the budget; a ring is the rate that was chosen for it, and a"
        " cross at the top a run that failed."
    )
    drawings = [
        Drawing(f"sweep-{number}", standing.name, about, partial(_draw_sweep, standing=standing), (3.1, 2.4))
        for number, standing in enumerate(found, 1)
        if any(outcome.nats and outcome.lr for outcome in standing.contender.sweep)
    ]
    return Panels("sweep", "Bits per byte against the learning rate", about, tuple(drawings)) if drawings else None


def _draw_sweep(axes: Any, standing: Standing) -> None:
    sweep = [outcome for outcome in standing.contender.sweep if outcome.lr]
    for number, share in enumerate(sorted({outcome.share for outcome in sweep})):
        by_rate: dict[float, list[float]] = {}
        for outcome in sweep:
            if outcome.share == share and outcome.nats and outcome.lr:
                by_rate.setdefault(outcome.lr, []).append(outcome.bits_per_byte)
        points = [(rate, float(np.mean(bits))) for rate, bits in sorted(by_rate.items())]
        if not points:
            continue
        look = OTHERS[number % len(OTHERS)]
        axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.dash, marker=".", linewidth=1.2)
        axes.annotate(
            f" {fraction(share)}", points[-1], (3, 0), textcoords="offset points", fontsize=8.5, color=look.colour,
            va="center",
        )  # fmt: skip
        chosen = {(outcome.share, outcome.lr) for outcome in standing.contender.outcomes}
        for rate, bits in points:
            if (share, rate) in chosen or (share not in standing.contender.shares and rate == standing.contender.rate):
                axes.plot([rate], [bits], color=INK, marker="o", markersize=9, fillstyle="none")
    failed = [outcome.lr for outcome in sweep if not outcome.nats]
    rates = [outcome.lr for outcome in sweep if outcome.lr]
    axes.set_xlim(padded(rates, 0.08, 0.2))
    ys = [outcome.bits_per_byte for outcome in sweep if outcome.nats]
    axes.set_ylim(padded(ys, 0.12, 0.2))
    axes.plot(failed, [0.95] * len(failed), "x", color=GREY, transform=axes.get_xaxis_transform(), linestyle="")
    log_axis(axes.xaxis, "learning rate", lambda tick: f"{tick:.2g}".replace("e-0", "e-"), most=4)
    log_axis(axes.yaxis, BITS, lambda tick: f"{tick:.4g}", most=4)


# ---- ablations


def effects_chart(effects: Sequence[Effect]) -> Drawing | None:
    """The main effect of every value of a setting against its base."""
    if not effects:
        return None
    about = (
        "How bits per byte change with one setting, on average over all others that were compared with both of its"
        " values. Left of zero, a negative number, is better than the base. The whisker is the 95 % interval."
    )
    rows = [
        Whisker(effect_name(each), each.difference, each.low, each.high, f"{each.difference:+.3f}", _side(each))
        for each in effects
    ]
    return Drawing("effects", "Main effects", about, partial(_draw_effects, rows=rows), whisker_size(rows))


def _draw_effects(axes: Any, rows: Sequence[Whisker]) -> None:
    ends = [0.0, *(row.low for row in rows), *(row.high for row in rows)]
    margin = 0.12 * (max(ends) - min(ends))
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    draw_whiskers(axes, rows, neutral=0.0)
    axes.set_xlabel(f"← better      change in {BITS}      worse →", fontsize=9)
    grid(axes)
    axes.yaxis.grid(False)


def _side(effect: Effect) -> Look:
    """Better, worse, or neither as far as the interval tells."""
    if effect.low <= 0 <= effect.high:
        return FAINT._replace(marker="o")
    return OTHERS[0] if effect.difference < 0 else OTHERS[1]


def effect_name(effect: Effect) -> str:
    """'placement: post → pre', by the last word of the key; 'position' for position.kind."""
    setting = effect.setting.removesuffix(".kind").rpartition(".")[2]
    return f"{setting}: {effect.base} → {effect.value}"
