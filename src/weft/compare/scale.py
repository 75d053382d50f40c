"""Measure the scaling law of a family on one text: train a ladder of sizes and lengths, fit, and check the next rung.

L(N, D) = E + A/N^α + B/D^β for N parameters and D tokens (Hoffmann et al. 2022, §3.3). The ladder is a comparison whose
contenders are the sizes of the family, so every size gets its best learning rate, and runs are parallel and resumable.
The page shows the training runs, the fit, and whether it predicted the next rung.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import make_interp_spline

from weft.compare.config import LADDER, PLAN, RUNG_RATIO, Experiment
from weft.compare.contenders import prepare_contenders
from weft.compare.experiment import claim_folder, compare
from weft.compare.fit import MIN_VALUES, Fit, Point, fit
from weft.compare.jobs import Comparison
from weft.compare.page import BITS, result_section, study_data
from weft.compare.pools import HERE, JobScheduler
from weft.compare.ranking import flops_text
from weft.compare.runner import Watch
from weft.compare.sizes import TooSmallError
from weft.costs.units import short
from weft.errors import ConfigError
from weft.figures.charts import Panels, PanelsPage
from weft.figures.formats import scientific
from weft.figures.page import Section, html_tables, part
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.prose import prose
from weft.figures.shapes import html_plots
from weft.figures.tables import Table, text_tables, wrap
from weft.machine import pick_device
from weft.progress import log_to_stderr

TEXTS = prose(__file__)
SIZE_RATIO = 2.0  # parameters of a size of the ladder, relative to the next smaller one
TOKENS_PER_PARAMETER = 10  # of the largest run; the smaller sizes have more
MIN_SIZES, MAX_SIZES = 3, 16  # sizes of a ladder
NEXT = "next"
EXTRAPOLATION = 30.0  # factor beyond the largest fitted budget up to which the optimal size is drawn
FLOPS = Axis("FLOPs in training", log=True, format="scientific", pad=0.06)
PARAMETERS = Axis("parameters", log=True, pad=0.08)
COSTS = {"flops": FLOPS, "tokens": Axis("tokens", log=True, pad=0.06)}
CURVE_POINTS = 24  # points of a drawn curve
ISOFLOP_BUDGETS = 4  # curves of equal compute, from the smallest run's to the largest's
CHART_SIZE = (480, 330)
CONSTANTS = {
    "E": ("E", "irreducible loss"),
    "A": ("A", "coefficient of the parameters"),
    "B": ("B", "coefficient of the tokens"),
    "alpha": ("α", "exponent of the parameters"),
    "beta": ("β", "exponent of the tokens"),
}
METHOD = tuple(TEXTS[name] for name in ("fitted", "fit-interval", "optimum", "next-trained"))


class Check(NamedTuple):
    """The next rung, which was not used in the fit: its measured loss, and the prediction with its interval."""

    measured: Point
    predicted: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the interval includes the measured loss."""
        return self.low <= self.measured.loss <= self.high

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it is too high."""
        return self.predicted / self.measured.loss - 1


@dataclass(frozen=True)
class ScalingPage(PanelsPage):
    """Page of a fit to bits per byte, and the check of the next rung; None if that diverged."""

    fit: Fit
    check: Check | None
    budget: float  # FLOPs of the next rung
    optimum: tuple[float, float]  # best parameters and tokens for it
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    title: str = "Scaling law"
    about: str = TEXTS["scaling"]

    @property
    def result(self) -> str:
        """Summary of the law and of its check, in a few sentences."""
        exponent = self.fit.beta / (self.fit.alpha + self.fit.beta)  # N ∝ C^exponent, D ∝ C^(1 − exponent)
        size, tokens = map(short, self.optimum)
        low, high = self.fit.optimal_interval(self.budget)
        known = low > 1 and high < 0.99 * self.budget / 6
        bounds = f"{short(low)}–{short(high)}" if known else "poorly determined by these runs"
        best = {"flops": flops_text(self.budget), "size": size, "bounds": bounds, "tokens": tokens}
        law = TEXTS["law"].format(exponent=exponent, token_exponent=1 - exponent, **best)
        if self.check is None:
            return law
        side, error = "inside" if self.check.holds else "outside", abs(self.check.error)
        values = self.check._asdict() | {"measured": self.check.measured.loss, "error": error, "side": side}
        return f"{law} {TEXTS['next-rung'].format(**values)}"

    def record(self) -> dict[str, Any]:
        """Return the summary, the constants with their intervals, the runs, and the next rung."""
        check = self.check and {**self.check.measured._asdict(), **self.check._asdict()}
        return {
            "result": self.result,
            "constants": {name: [getattr(self.fit, name), *self.fit.intervals[name]] for name in CONSTANTS},
            "runs": [point._asdict() for point in self.fit.points],
            "next": check and {key: value for key, value in check.items() if key != "measured"},
        }

    def text(self) -> str:
        return "\n\n".join([text_tables(self.tables()), "\n".join(wrap(self.result))])

    def data(self) -> dict[str, Any]:
        """Return the page's texts, tables and charts as values, for the Explorer."""
        texts = {"kind": "scale", "title": self.title, "about": self.about, "result": self.result}
        shared = study_data(self.panels(), self.tables(), [*METHOD, *self.notes])
        return {**texts, **shared, "contenders": [], "facts": dict(self.facts), "command": self.command}

    def sections(self) -> list[Section]:
        panels, charts = self.panels(), []
        for title, group in (("Scaling law", panels[:4]), ("Training runs", panels[4:])):
            plots = html_plots([plot for panel in group for plot in panel.plots])
            charts.append(Section(title, " ".join(dict.fromkeys(p.about for p in group)), plots, ("chart.js",)))
        tables, notes = html_tables(self.tables()), part("notes", [*METHOD, *self.notes])
        first = result_section(self.result, self.facts, self.command)
        return [first, *charts, Section("Tables", "", tables), Section("Method", "", notes)]

    def tables(self) -> list[Table]:
        constants, runs = [], []
        for name, (symbol, meaning) in CONSTANTS.items():
            interval = "–".join(f"{end:.4g}" for end in self.fit.intervals[name])
            constants.append((symbol, meaning, f"{getattr(self.fit, name):.4g}", interval))
        for run in chain.from_iterable(self._by_size().values()):
            fitted, residual = self.fit.predict(run.parameters, run.tokens), self._residual(run)
            costs = (short(run.parameters), short(run.tokens), flops_text(run.flops))
            runs.append((*costs, f"{run.loss:.4f}", f"{fitted:.4f}", f"{residual:+.2%}"))
        header = ("parameters", "tokens", "FLOPs", "bits per byte", "fit", "residual")
        law = Table(("constant", "meaning", "value", "95% interval"), constants, "Fitted constants", text=(0, 1))
        return [law, Table(header, runs, "Training runs used in the fit", text=())]

    def _by_size(self) -> dict[float, list[Point]]:
        ordered = sorted(self.fit.points, key=lambda point: (point.parameters, point.tokens))
        sizes = dict.fromkeys(point.parameters for point in ordered)
        return {size: [point for point in ordered if point.parameters == size] for size in sizes}

    def _residual(self, point: Point) -> float:
        return point.loss / self.fit.predict(point.parameters, point.tokens) - 1

    def panels(self) -> list[Panels]:
        losses = [self._losses(*cost) for cost in COSTS.items()]
        return [*losses, self._isoflops(), self._optima(), self._runs(), self._residuals()]

    def _losses(self, amount: str, axis: Axis) -> Panels:
        series, sizes = list[Series](), self._by_size()
        for number, (size, runs) in enumerate(sizes.items()):
            colour = _shade(number / max(len(sizes) - 1, 1))
            per_token = float(np.mean([getattr(run, amount) / run.tokens for run in runs]))
            tokens = _geometric([run.tokens for run in runs], CURVE_POINTS)
            line = [(per_token * count, self.fit.predict(size, count)) for count in tokens]
            series.append(Series(points=line, look=Look(colour, width=1.3), labels=_at_end(short(size))))
            measured = [(getattr(run, amount), run.loss) for run in runs]
            series.append(Series(points=measured, look=Look(colour, "o", width=0)))
        if self.check:
            run = self.check.measured
            cost, star = getattr(run, amount), Look("c1", "*", width=0)
            series.append(Series(points=[(cost, end) for end in self.check[2:]], look=Look("c1", "_")))
            series.append(Series(points=[(cost, run.loss)], look=star, labels=[short(run.parameters)]))
        title = f"Bits per byte against {axis.label.split(' ')[0]}, by parameters"
        plot = Plot(title, series, axis, BITS, size=CHART_SIZE)
        return Panels("scaling-loss" if amount == "flops" else f"scaling-loss-{amount}", TEXTS["scaling-loss"], [plot])

    def _isoflops(self) -> Panels:
        points, series = self.fit.points, list[Series]()
        all_flops, all_sizes = ([getattr(point, field) for point in points] for field in ("flops", "parameters"))
        budgets, sizes = _geometric(all_flops, ISOFLOP_BUDGETS), _geometric(all_sizes, CURVE_POINTS)
        nearest = [min(budgets, key=lambda budget: abs(math.log(flops / budget))) for flops in all_flops]
        for number, budget in enumerate(budgets):
            colour, best = _shade(number / (ISOFLOP_BUDGETS - 1)), self.fit.optimal(budget)
            line = [(size, self.fit.predict(size, budget / 6 / size)) for size in sizes]
            near = [(run.parameters, run.loss) for run, its in zip(points, nearest, strict=True) if its == budget]
            series.append(Series(points=line, look=Look(colour, width=1.3), labels=_at_end(scientific(budget))))
            series.append(Series(points=near, look=Look(colour, "o", width=0)))
            if sizes[0] <= best[0] <= sizes[-1]:
                series.append(Series(points=[(best[0], self.fit.predict(*best))], look=Look("c1", "D", width=0)))
        plot = Plot("Bits per byte against parameters, by FLOPs", series, PARAMETERS, BITS, size=CHART_SIZE)
        return Panels("scaling-isoflops", TEXTS["isoflops"], [plot])

    def _optima(self) -> Panels:
        flops = [point.flops for point in self.fit.points]
        budgets = _geometric([min(flops), max(EXTRAPOLATION * max(flops), 1.5 * self.budget)], CURVE_POINTS)
        best = [(budget, self.fit.optimal(budget)[0]) for budget in budgets]
        optimum = self.fit.optimal(self.budget)[0]
        point = Series(points=[(self.budget, optimum)], look=Look("c1", "D", width=0), labels=[short(optimum)])
        series = [Series(points=best, band=[self.fit.optimal_interval(budget) for budget in budgets]), point]
        marks = [(max(flops), "the largest training run")]
        plot = Plot("Optimal size for a budget", series, FLOPS, PARAMETERS, marks, CHART_SIZE)
        return Panels("scaling-optimum", TEXTS["optima"], [plot])

    def _runs(self) -> Panels:
        budgets = [point.flops for point in (*self.fit.points, *([self.check.measured] if self.check else []))]
        best = [self.fit.optimal(flops) for flops in _geometric(budgets, CURVE_POINTS)]
        line = Series(points=[(tokens, size) for size, tokens in best], look=Look("soft", dash="6 3", width=1.2))
        losses = [math.log(point.loss) for point in self.fit.points]
        span = max(losses) - min(losses) or 1.0
        series = [line]
        for point, loss in zip(self.fit.points, losses, strict=True):
            look = Look(_shade((max(losses) - loss) / span), "o", width=0)
            series.append(Series(points=[(point.tokens, point.parameters)], look=look, labels=[f"{point.loss:.3g}"]))
        if self.check:
            run = self.check.measured
            series.append(Series(points=[(run.tokens, run.parameters)], look=Look("c1", "*", width=0)))
        tokens = Axis("tokens", log=True, pad=0.08)
        plot = Plot("Sizes and lengths of the runs", series, tokens, PARAMETERS, size=CHART_SIZE)
        return Panels("scaling-runs", TEXTS["trained"], [plot])

    def _residuals(self) -> Panels:
        points = [(point.loss, 100 * self._residual(point)) for point in self.fit.points]
        limit = max(0.1, *(abs(y) for _, y in points)) * 1.2
        series = [Series(points=points, look=Look(marker="o", width=0)), Series(look=Look("ink", width=0.9), level=0.0)]
        x, y = Axis("measured bits per byte"), Axis("%", includes=(-limit, limit))
        plot = Plot("Residuals: measured minus fitted", series, x, y, size=CHART_SIZE)
        return Panels("scaling-residuals", TEXTS["residuals"], [plot])


def _geometric(values: Sequence[float], count: int) -> list[float]:
    """Return `count` values from the smallest to the largest, evenly spaced on a logarithmic axis."""
    return [float(value) for value in np.geomspace(min(values), max(values), count)]


def _at_end(label: str) -> list[str]:
    """Return the labels of a curve that is labelled at its last point."""
    return [*[""] * (CURVE_POINTS - 1), label]


def _shade(strength: float) -> str:
    """Return a shade from 0, light but legible, to 1, the darkest."""
    return f"{50 + 50 * strength:.0f}%"


def ladder(experiment: Experiment, sizes: int) -> Experiment:
    """Return the comparison of `sizes` sizes of the one contender, the largest of which has the whole budget."""
    if len(experiment.contenders) != 1 or experiment.vary:
        raise ConfigError("a scaling law is of one family: give one preset or recipe")
    if experiment.budget.flops is None:
        raise ConfigError("the budget of a ladder is the FLOPs of its largest run: give --flops, for instance 1e13")
    if experiment.rungs < MIN_VALUES:
        raise ConfigError(f"--rungs {experiment.rungs}: a scaling law needs {MIN_VALUES} lengths of training or more")
    if not MIN_SIZES <= sizes <= MAX_SIZES:
        raise ConfigError(f"--sizes {sizes}: a scaling law needs {MIN_SIZES} to {MAX_SIZES} sizes, each twice the last")
    (base,) = experiment.contenders.values()
    largest = math.sqrt(experiment.budget.flops / (6 * TOKENS_PER_PARAMETER))
    parameters = [largest * SIZE_RATIO**-rung for rung in reversed(range(sizes))]
    contenders = {short(size): base.replace(parameters=size).model_dump() for size in parameters}
    return experiment.replace(contenders=contenders, budget={"tokens": round(experiment.budget.flops / (6 * largest))})


def scale(
    experiment: Experiment,
    out: Path,
    *,
    sizes: int = 5,
    jobs: JobScheduler = HERE,
    watch: Watch = lambda progress: None,
    command: str = "",
) -> ScalingPage:
    """Train the ladder, fit the law, and train its best size for three times the FLOPs. For the rest, see `compare`."""
    run = partial(compare, data=out / "data", jobs=jobs, watch=watch, command=command)
    with claim_folder(out, f"{LADDER}/{PLAN}"):
        check_budget(experiment, sizes, out / "data")
        trained = run(ladder(experiment, sizes), out / LADDER)
        points = points_of(trained)
        law = fit(points)
        budget = RUNG_RATIO * max(point.flops for point in points)
        parameters, tokens = law.optimal_counted(budget, cost_per_token(points))
        (base,) = experiment.contenders.values()
        contender = base.replace(parameters=parameters).model_dump()
        following = experiment.replace(contenders={NEXT: contender}, budget={"tokens": round(tokens)}, rungs=1)
        check = check_of(law, points_of(run(following, out / NEXT)))
    optimum, facts, notes = (parameters, tokens), trained.facts, trained.notes
    return ScalingPage(law, check, budget, optimum=optimum, command=trained.command, facts=facts, notes=notes)


def check_budget(experiment: Experiment, sizes: int, data: Path) -> None:
    """Refuse a budget for which a size of the ladder is too small, or a length too short, and suggest a larger one."""
    given = needed = experiment.budget.amount
    while True:
        rungs = ladder(experiment.replace(budget={"flops": needed}), sizes)
        try:
            contenders = prepare_contenders(rungs, data, pick_device().type, log=log_to_stderr)
            step, parameters = max(contender.tokens_per_step for contender in contenders), 0.0
            if rungs.budget.amount >= step * RUNG_RATIO ** (rungs.rungs - 1):
                break
        except TooSmallError as error:
            step, parameters = error.tokens, error.parameters
        tokens = step * RUNG_RATIO ** (rungs.rungs - 1)
        largest = max(parameters * SIZE_RATIO ** (sizes - 1), tokens / TOKENS_PER_PARAMETER)
        digit = 10.0 ** (math.floor(math.log10(needed := 6 * TOKENS_PER_PARAMETER * largest**2)) - 1)
        needed = math.ceil(1.01 * needed / digit) * digit
    if needed > given:
        family, smaller = next(iter(experiment.contenders)), "fewer --sizes or --rungs, or a smaller batch.size"
        trained = f"each trained for {rungs.rungs} lengths of a step or more"
        problem = f"--budget {given:.3g}: too small for {sizes} sizes of {family}, {trained}"
        raise ConfigError(f"{problem}; give --budget {needed:.2g} or more, or {smaller}")


def points_of(comparison: Comparison) -> list[Point]:
    """Return the size, tokens, bits per byte and FLOPs of every finished run."""
    outcomes = (outcome for result in comparison.contenders for outcome in result.outcomes if outcome.nats)
    return [Point(each.multiplied, each.tokens, each.bits_per_byte, flops=each.flops) for each in outcomes]


def check_of(law: Fit, points: Sequence[Point]) -> Check | None:
    """Return the next rung, averaged over seeds, with the law's prediction; None if it diverged."""
    if not points:
        return None
    measured = points[0]._replace(loss=float(np.mean([point.loss for point in points])))
    size, tokens = measured[:2]
    return Check(measured, law.predict(size, tokens), *law.predict_interval(size, tokens))


def cost_per_token(points: Sequence[Point]) -> Callable[[float], float]:
    """Return FLOPs per token as a function of parameters: linear between the ladder's sizes on log axes, and beyond."""
    known = sorted({point.parameters: point.flops / point.tokens for point in points}.items())
    line = make_interp_spline(*np.log(known).T, k=1)
    return lambda parameters: float(np.exp(line(np.log(parameters))))
