"""The charts of a scaling law: loss against operations at each size, what was trained, residuals, the optimal size."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import to_hex

from weft.compare.drawing import GREY, INK, OTHERS, Drawing, End, Look, log_axis, name_lines, padded, scientific
from weft.compare.fit import Fit
from weft.costs.units import short
from weft.figures.charts import grid
from weft.figures.picture import SHADES

FURTHER = 30.0  # times the largest budget that was fitted: so far the optimal size is drawn


class Rung(NamedTuple):
    """A training run: `parameters` N, `tokens` D, the operations it took, and the loss it ended with, over seeds."""

    parameters: float
    tokens: float
    flops: float
    loss: float


class Check(NamedTuple):
    """The next rung, which was not fitted: what was measured, and what the fit had predicted with its interval."""

    measured: Rung
    predicted: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the interval includes what was measured."""
        return self.low <= self.measured.loss <= self.high

    @property
    def error(self) -> float:
        """By what part of the measured loss the prediction is too high."""
        return self.predicted / self.measured.loss - 1


def by_size(points: Sequence[Rung]) -> dict[float, list[Rung]]:
    """The points of each size, ascending, in the order of their tokens."""
    sizes = sorted({point.parameters for point in points})
    return {size: sorted((p for p in points if p.parameters == size), key=lambda p: p.tokens) for size in sizes}


def loss_chart(fit: Fit, points: Sequence[Rung], check: Check | None, unit: str) -> Drawing:
    """Loss against operations."""
    about = (
        "A mark is a training run, and a line is the fit at one size, from fewer tokens to more. The lowest line at a"
        " budget is the size to train with it. The star is the next rung, which was not fitted, and the bar beside it"
        " the interval that the fit predicted."
    )
    draw = partial(_draw_loss, fit=fit, points=points, check=check, unit=unit)
    return Drawing("scaling-loss", f"{unit.capitalize()} against FLOPs, by parameters", about, draw, (4.3, 3.6))


def _draw_loss(axes: Any, fit: Fit, points: Sequence[Rung], check: Check | None, unit: str) -> None:
    sizes, ends = by_size(points), []
    losses = [point.loss for point in points]
    budgets = [point.flops for point in points]
    if check:
        losses += [check.measured.loss, check.predicted, check.low, check.high]
        budgets.append(check.measured.flops)
    axes.set_xlim(padded(budgets, above=0.1))
    axes.set_ylim(padded(losses))
    for number, (size, runs) in enumerate(sizes.items()):
        look = Look(_shade(number / max(len(sizes) - 1, 1)), "o", "-")
        tokens = np.geomspace(runs[0].tokens, runs[-1].tokens, 40)
        each = float(np.mean([run.flops / run.tokens for run in runs]))
        predicted = [fit.predict(size, float(count)) for count in tokens]
        axes.plot(each * tokens, predicted, color=look.colour, linewidth=1.3)
        axes.plot([run.flops for run in runs], [run.loss for run in runs], "o", color=look.colour, markersize=4)
        ends.append(End(float(each * tokens[-1]), predicted[-1], short(size), look))
    if check:
        flops = check.measured.flops
        axes.plot([flops, flops], [check.low, check.high], color=OTHERS[1].colour, linewidth=2)
        axes.plot([flops], [check.predicted], "_", color=OTHERS[1].colour, markersize=9)
        axes.plot([flops], [check.measured.loss], "*", color=OTHERS[1].colour, markersize=8)
        ends.append(End(flops, check.measured.loss, short(check.measured.parameters), OTHERS[1]))
    log_axis(axes.xaxis, "FLOPs in training", scientific, most=5)
    log_axis(axes.yaxis, unit, lambda tick: f"{tick:.4g}")
    name_lines(axes, ends)


def runs_chart(fit: Fit, points: Sequence[Rung], check: Check | None) -> Drawing:
    """Parameters against tokens."""
    about = (
        "Each mark is a training run, with its loss: the stronger the shade, the lower. The dashed line joins the"
        " optimal sizes."
    )
    draw = partial(_draw_runs, fit=fit, points=points, check=check)
    return Drawing("scaling-runs", "What was trained", about, draw, (4.3, 3.4))


def _draw_runs(axes: Any, fit: Fit, points: Sequence[Rung], check: Check | None) -> None:
    losses = [math.log(point.loss) for point in points]
    span = max(losses) - min(losses) or 1.0
    every = [*points, *([check.measured] if check else [])]
    axes.set_xlim(padded([point.tokens for point in every], 0.1, 0.1))
    axes.set_ylim(padded([point.parameters for point in every], 0.1, 0.1))
    best = [fit.optimal(float(flops)) for flops in np.geomspace(*_reach(every, 1.0), 40)]
    axes.plot([tokens for _, tokens in best], [size for size, _ in best], "--", color=GREY, linewidth=1.2)
    for point, loss in zip(points, losses, strict=True):
        colour = _shade((max(losses) - loss) / span)
        axes.plot([point.tokens], [point.parameters], "o", color=colour, markersize=7, markeredgecolor=GREY, mew=0.5)
        axes.annotate(
            f"{point.loss:.3g}", (point.tokens, point.parameters), (0, 6), textcoords="offset points", ha="center",
            fontsize=7.5,
        )  # fmt: skip
    if check:
        axes.plot([check.measured.tokens], [check.measured.parameters], "*", color=OTHERS[1].colour, markersize=9)
    log_axis(axes.xaxis, "tokens", short, most=5)
    log_axis(axes.yaxis, "parameters", short, most=5)


def residual_chart(fit: Fit, points: Sequence[Rung], unit: str) -> Drawing:
    """What the fit leaves over."""
    about = "A good fit leaves no pattern: as many marks above zero as below, at low losses and at high ones."
    draw = partial(_draw_residuals, fit=fit, points=points, unit=unit)
    return Drawing("scaling-residuals", "Residuals: measured less predicted", about, draw, (4.3, 2.8))


def residual(fit: Fit, point: Rung) -> float:
    """Measured over predicted loss, less 1."""
    return point.loss / fit.predict(point.parameters, point.tokens) - 1


def _draw_residuals(axes: Any, fit: Fit, points: Sequence[Rung], unit: str) -> None:
    left = [100 * residual(fit, point) for point in points]
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.plot([point.loss for point in points], left, "o", color=OTHERS[0].colour, markersize=4)
    most = max(0.1, *map(abs, left)) * 1.2
    axes.set_ylim(-most, most)
    axes.set_xlabel(f"measured {unit}", fontsize=9.5)
    axes.set_ylabel("%", fontsize=9.5)
    grid(axes)


def optimum_chart(fit: Fit, points: Sequence[Rung], budget: float | None) -> Drawing:
    """The optimal size against the budget."""
    about = (
        "The optimum is the size, with as many tokens as the budget then allows, that the fit gives the lowest loss;"
        " the band is its 95 % interval. Right of the thin vertical line nothing was trained: there the fit is"
        " continued."
    )
    draw = partial(_draw_optimum, fit=fit, points=points, budget=budget)
    return Drawing("scaling-optimum", "Optimal size for a budget", about, draw, (4.3, 3.6))


def _draw_optimum(axes: Any, fit: Fit, points: Sequence[Rung], budget: float | None) -> None:
    low, high = _reach(points, FURTHER)
    high = max(high, 1.5 * budget) if budget else high
    budgets = [float(flops) for flops in np.geomspace(low, high, 40)]
    best = [fit.optimal(flops)[0] for flops in budgets]
    bounds = np.array([fit.optimal_interval(flops) for flops in budgets])
    look = OTHERS[0]
    axes.set_xlim(low, high)
    axes.set_ylim(padded([*best, *bounds.ravel()]))
    axes.axvline(max(point.flops for point in points), color=GREY, linewidth=0.8)
    axes.fill_between(budgets, *bounds.T, color=look.colour, alpha=0.18, linewidth=0)
    axes.plot(budgets, best, color=look.colour, linewidth=1.6)
    if budget:
        size = fit.optimal(budget)[0]
        axes.plot([budget], [size], "D", color=OTHERS[1].colour, markersize=5)
        axes.annotate(
            short(size), (budget, size), (-6, 6), textcoords="offset points", ha="right", fontsize=9.5,
            color=OTHERS[1].colour,
        )  # fmt: skip
    log_axis(axes.xaxis, "FLOPs in training", scientific, most=5)
    log_axis(axes.yaxis, "parameters", short, most=6)


def _reach(points: Sequence[Rung], further: float) -> tuple[float, float]:
    budgets = [point.flops for point in points]
    return min(budgets), further * max(budgets)


def _shade(part: float) -> str:
    """One of the shades that a page has too: the darkest at 1, and one that can still be read at 0."""
    return to_hex(SHADES(int(130 + 125 * part)))
