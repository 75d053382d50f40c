"""A scaling law of one family on one text: a ladder of sizes and lengths, the fit, and the next rung to check it.

L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, §3.3). The ladder is a comparison whose contenders are the sizes of
a family, so that every size has its own best learning rate, and runs go side by side and survive interruption.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.compare.config import RATIO, Experiment
from weft.compare.experiment import PLAN, Workplace, claimed_folder, compare
from weft.compare.fit import Fit, Point, fit
from weft.compare.results import Comparison, Measured
from weft.compare.scaling_charts import Check, Rung
from weft.compare.scaling_page import ScalingPage
from weft.costs.units import short
from weft.errors import ConfigError

SPREAD = 2.0  # of one size of the ladder and the next
TOKENS = 10  # a parameter, of the largest run: the smaller sizes have more
MOST = 16  # sizes
LADDER, NEXT = "ladder", "next"


@dataclass(frozen=True)
class Scaled:
    """A ladder, the law that was fitted to it, and the next rung, which was not."""

    ladder: Comparison
    fit: Fit
    budget: float  # of the next rung, in FLOPs
    optimum: tuple[float, float]  # its parameters and tokens by the law
    checked: Comparison


def ladder(experiment: Experiment, sizes: int) -> Experiment:
    """The comparison of `sizes` sizes of the one contender, the largest of which has the whole budget."""
    if len(experiment.contenders) != 1 or experiment.vary:
        raise ConfigError("a scaling law is of one family: give one preset or recipe")
    if experiment.budget.flops is None:
        raise ConfigError("a ladder's budget is in FLOPs, those of its largest run: give --flops, for instance 1e13")
    if not 3 <= sizes <= MOST:
        raise ConfigError(
            f"--sizes {sizes}: a law needs three sizes or more, each twice the one before; {MOST} at most"
        )
    (base,) = experiment.contenders.values()
    largest = math.sqrt(experiment.budget.flops / (6 * TOKENS))
    wanted = [largest * SPREAD**-rung for rung in reversed(range(sizes))]
    contenders = {short(size): base.replace(parameters=size).model_dump() for size in wanted}
    tokens = round(experiment.budget.flops / (6 * largest))
    return experiment.replace(contenders=contenders, budget={"tokens": tokens})


def scale(experiment: Experiment, place: Workplace, sizes: int = 5) -> Scaled:
    """Train the ladder, fit the law, and train the size that it finds best for a budget three times as large."""
    asked = ladder(experiment, sizes)
    with claimed_folder(place.out, f"{LADDER}/{PLAN}"):
        return _scale(experiment, asked, place)


def _scale(experiment: Experiment, asked: Experiment, place: Workplace) -> Scaled:
    data = place.out / "data"
    found = compare(asked, replace(place, out=place.out / LADDER, data=data))
    law = fit([Point(rung.parameters, rung.tokens, rung.loss) for rung in rungs_of(found.contenders)])
    budget = RATIO * max(outcome.flops for each in found.contenders for outcome in each.outcomes)
    parameters, tokens = law.optimal_counted(budget, _cost(found.contenders))
    (base,) = experiment.contenders.values()
    contender = base.replace(parameters=parameters).model_dump()
    following = experiment.replace(contenders={NEXT: contender}, budget={"tokens": round(tokens)}, rungs=1)
    checked = compare(following, replace(place, out=place.out / NEXT, data=data))
    return Scaled(found, law, budget, (parameters, tokens), checked)


def page_of(found: Scaled) -> ScalingPage:
    """The law, what it stands on, and whether it held, on a page."""
    return ScalingPage(
        found.fit,
        rungs_of(found.ladder.contenders),
        _check(found),
        found.budget,
        found.optimum,
        command=found.ladder.command,
        facts=found.ladder.facts,
        notes=found.ladder.notes,
    )


def rungs_of(contenders: Sequence[Measured]) -> list[Rung]:
    """Every finished run of the ladder: its size, what it has read, what that cost and its bits per byte."""
    return [
        Rung(outcome.multiplied, outcome.tokens, outcome.flops, outcome.bits_per_byte)
        for each in contenders
        for outcome in each.outcomes
        if outcome.nats
    ]


def _check(found: Scaled) -> Check | None:
    """The next rung, the mean over its seeds, beside what the law says of it; None where it diverged."""
    rungs = rungs_of(found.checked.contenders)
    if not rungs:
        return None
    size, tokens, flops = rungs[0][:3]
    measured = Rung(size, tokens, flops, float(np.mean([rung.loss for rung in rungs])))
    return Check(measured, found.fit.predict(size, tokens), *found.fit.predict_interval(size, tokens))


def _cost(contenders: Sequence[Measured]) -> Callable[[float], float]:
    """FLOPs a token by the number of parameters: straight lines between the ladder's sizes on log axes, and beyond."""
    known: Mapping[float, float] = {
        outcome.multiplied: outcome.flops / outcome.tokens for each in contenders for outcome in each.outcomes
    }
    sizes = sorted(known)
    x, y = np.log(sizes), np.log([known[size] for size in sizes])

    def cost(parameters: float) -> float:
        at = math.log(parameters)
        place = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
        slope = (y[place + 1] - y[place]) / (x[place + 1] - x[place])
        return float(math.exp(y[place] + slope * (at - x[place])))

    return cost
