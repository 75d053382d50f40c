"""A scaling law of one family on one text: a ladder of sizes and lengths, the fit, and the next rung to check it.

L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, §3.3). The ladder is a comparison whose contenders are the sizes of
a family, so that every size has its own best learning rate, and runs go side by side and survive interruption.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.interpolate import make_interp_spline

from weft.compare.config import RATIO, Experiment
from weft.compare.experiment import PLAN, Workplace, claimed_folder, compare
from weft.compare.fit import Fit, Point, fit
from weft.compare.jobs import Comparison
from weft.compare.scaling_page import Check, ScalingPage
from weft.costs.units import short
from weft.errors import ConfigError

SPREAD = 2.0  # of one size of the ladder and the next
TOKENS_PER_PARAMETER = 10  # of the largest run: the smaller sizes have more
MAX_SIZES = 16  # of a ladder
LADDER, NEXT = "ladder", "next"


def ladder(experiment: Experiment, sizes: int) -> Experiment:
    """The comparison of `sizes` sizes of the one contender, the largest of which has the whole budget."""
    if len(experiment.contenders) != 1 or experiment.vary:
        raise ConfigError("a scaling law is of one family: give one preset or recipe")
    if experiment.budget.flops is None:
        raise ConfigError("a ladder's budget is in FLOPs, those of its largest run: give --flops, for instance 1e13")
    if not 3 <= sizes <= MAX_SIZES:
        raise ConfigError(
            f"--sizes {sizes}: a law needs three sizes or more, each twice the one before; {MAX_SIZES} at most"
        )
    (base,) = experiment.contenders.values()
    largest = math.sqrt(experiment.budget.flops / (6 * TOKENS_PER_PARAMETER))
    wanted = [largest * SPREAD**-rung for rung in reversed(range(sizes))]
    contenders = {short(size): base.replace(parameters=size).model_dump() for size in wanted}
    tokens = round(experiment.budget.flops / (6 * largest))
    return experiment.replace(contenders=contenders, budget={"tokens": tokens})


def scale(experiment: Experiment, place: Workplace, sizes: int = 5) -> ScalingPage:
    """Train the ladder, fit the law, and train the size that it finds best for a budget three times as large."""
    asked = ladder(experiment, sizes)
    data = place.out / "data"
    with claimed_folder(place.out, f"{LADDER}/{PLAN}"):
        found = compare(asked, replace(place, out=place.out / LADDER, data=data))
        points = points_of(found)
        law = fit(points)
        budget = RATIO * max(point.flops for point in points)
        parameters, tokens = law.optimal_counted(budget, cost_per_token(points))
        (base,) = experiment.contenders.values()
        contender = base.replace(parameters=parameters).model_dump()
        following = experiment.replace(contenders={NEXT: contender}, budget={"tokens": round(tokens)}, rungs=1)
        checked = compare(following, replace(place, out=place.out / NEXT, data=data))
    check = check_of(law, points_of(checked))
    return ScalingPage(
        law, check, budget, (parameters, tokens), command=found.command, facts=found.facts, notes=found.notes
    )


def points_of(found: Comparison) -> list[Point]:
    """Every finished run: its size, what it has read, its bits per byte and what training took."""
    return [
        Point(outcome.multiplied, outcome.tokens, outcome.bits_per_byte, outcome.flops)
        for each in found.contenders
        for outcome in each.outcomes
        if outcome.nats
    ]


def check_of(law: Fit, points: Sequence[Point]) -> Check | None:
    """The next rung, the mean over its seeds, beside what the law says of it; None where it diverged."""
    if not points:
        return None
    measured = points[0]._replace(loss=float(np.mean([point.loss for point in points])))
    size, tokens = measured[:2]
    return Check(measured, law.predict(size, tokens), *law.predict_interval(size, tokens))


def cost_per_token(points: Sequence[Point]) -> Callable[[float], float]:
    """FLOPs a token by the number of parameters: straight lines between the ladder's sizes on log axes, and beyond."""
    known = sorted({point.parameters: point.flops / point.tokens for point in points}.items())
    line = make_interp_spline(*np.log(known).T, k=1)
    return lambda parameters: float(np.exp(line(np.log(parameters))))
