"""A scaling law of one family on one text: a ladder of sizes and lengths, the fit, and the next rung to check it.

L(N, D) = E + A/N^α + B/D^β for N parameters and D tokens (Hoffmann et al. 2022, §3.3). The ladder is a comparison whose
contenders are the sizes of a family, so that every size has its own best learning rate, and runs go side by side and
survive interruption. The page shows what was trained, the fit through it, and whether it predicted the next rung.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import make_interp_spline

from weft.compare.config import LADDER, PLAN, RATIO, Experiment
from weft.compare.contenders import make_ready
from weft.compare.experiment import Workplace, claimed_folder, compare
from weft.compare.fit import MIN_VALUES, Fit, Point, fit
from weft.compare.jobs import Comparison
from weft.compare.page import BITS, result_section, study_data
from weft.compare.ranking import flops_text
from weft.compare.sizes import TooSmallError
from weft.costs.units import short
from weft.errors import ConfigError
from weft.figures.charts import Panels, PanelsPage
from weft.figures.page import Section, html_tables, part
from weft.figures.plot import Axis, Look, Plot, Series, scientific
from weft.figures.prose import prose
from weft.figures.shapes import html_plots
from weft.figures.tables import Table, text_tables, wrapped
from weft.machine import pick_device
from weft.progress import log_to_stderr

TEXTS = prose(__file__)
SPREAD = 2.0  # of one size of the ladder and the next
TOKENS_PER_PARAMETER = 10  # of the largest run: the smaller sizes have more
MAX_SIZES = 16  # of a ladder
NEXT = "next"
FURTHER = 30.0  # times the largest budget that was fitted: so far the optimal size is drawn
FLOPS = Axis("FLOPs in training", log=True, named=scientific, pad=0.06)
PARAMETERS = Axis("parameters", log=True, named=short, pad=0.08)
AGAINST = {"flops": FLOPS, "tokens": Axis("tokens", log=True, named=short, pad=0.06)}
LINE = 24  # points of a curve of the fit
ISOFLOPS = 4  # budgets, from that of the smallest run to that of the largest
SIZE = (480, 330)  # of a chart
CONSTANTS = {
    "E": ("E", "loss that no size and no text removes"),
    "A": ("A", "weight of the size"),
    "B": ("B", "weight of the text"),
    "alpha": ("α", "how fast the loss falls with parameters"),
    "beta": ("β", "how fast the loss falls with tokens"),
}
METHOD = (
    TEXTS["fitted"],
    TEXTS["fit-interval"],
    "The optimal size minimises the fit for a budget of C = 6·N·D operations.",
    "Only the smaller rungs are fitted. The next rung is trained afterwards, to see whether the fit predicts it.",
)


class Check(NamedTuple):
    """The next rung, which was not fitted: what was measured, and what the fit had predicted with its interval."""

    measured: Point
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


@dataclass(frozen=True)
class ScalingPage(PanelsPage):
    """A fit to bits per byte, and the next rung, which it had not seen; there is none where that diverged.

    `optimum` are the parameters and tokens that are best for a larger `budget`, in FLOPs.
    """

    fit: Fit
    check: Check | None
    budget: float
    optimum: tuple[float, float]
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    title: str = "Scaling law"
    about: str = TEXTS["scaling"]

    @property
    def result(self) -> str:
        """What the law says, and whether it held, in a few sentences."""
        share = self.fit.beta / (self.fit.alpha + self.fit.beta)  # N ∝ C^share, D ∝ C^(1 − share)
        size, tokens = map(short, self.optimum)
        low, high = self.fit.optimal_interval(self.budget)
        known = low > 1 and high < 0.99 * self.budget / 6
        bounds = f"{short(low)}–{short(high)}" if known else "the runs hardly tell"
        told = (
            f"The optimal size grows with C^{share:.2f} and the tokens with C^{1 - share:.2f} of the budget C."
            f" For {flops_text(self.budget)} FLOPs it is {size} parameters ({bounds}), trained on {tokens} tokens."
        )
        if self.check:
            word = "inside" if self.check.holds else "outside"
            told += (
                f" The next rung, which was not fitted, was predicted at {self.check.predicted:.3f} bits per byte and"
                f" measured at {self.check.measured.loss:.3f}: {abs(self.check.error):.1%} off, {word} the interval"
                f" ({self.check.low:.3f}–{self.check.high:.3f})."
            )
        return told

    def record(self) -> dict[str, Any]:
        """The same as values: the constants with their intervals, the runs, and the next rung."""
        check = self.check and {**self.check.measured._asdict(), **self.check._asdict()}
        return {
            "result": self.result,
            "constants": {name: [getattr(self.fit, name), *self.fit.intervals[name]] for name in CONSTANTS},
            "runs": [point._asdict() for point in self.fit.points],
            "next": check and {key: value for key, value in check.items() if key != "measured"},
        }

    def text(self) -> str:
        return "\n\n".join([text_tables(self.tables()), "\n".join(wrapped(self.result))])

    def data(self) -> dict[str, Any]:
        """What the Explorer shows of it: the same texts, numbers and charts as values."""
        told = {"kind": "scale", "title": self.title, "about": self.about, "result": self.result}
        shared = study_data(self.panels(), self.tables(), [*METHOD, *self.notes])
        return {**told, **shared, "contenders": [], "facts": dict(self.facts), "command": self.command}

    def sections(self) -> list[Section]:
        panels, charts = self.panels(), []
        for title, pair in (("The law", panels[:4]), ("What it stands on", panels[4:])):
            plots = html_plots([plot for each in pair for plot in each.plots])
            charts.append(Section(title, " ".join(each.about for each in pair), plots, ("chart.js",)))
        return [
            result_section(self.result, self.facts, self.command),
            *charts,
            Section("In numbers", "", html_tables(self.tables())),
            Section("How it was fitted", "", part("notes", [*METHOD, *self.notes])),
        ]

    def tables(self) -> list[Table]:
        constants, runs = [], []
        for name, (symbol, meaning) in CONSTANTS.items():
            interval = "–".join(f"{end:.4g}" for end in self.fit.intervals[name])
            constants.append((symbol, meaning, f"{getattr(self.fit, name):.4g}", interval))
        for run in chain.from_iterable(self._by_size().values()):
            fitted, left = self.fit.predict(run.parameters, run.tokens), self._residual(run)
            took = (short(run.parameters), short(run.tokens), flops_text(run.flops))
            runs.append((*took, f"{run.loss:.4f}", f"{fitted:.4f}", f"{left:+.2%}"))
        header = ("parameters", "tokens", "FLOPs", "bits per byte", "fit", "residual")
        return [
            Table(("constant", "what it is", "value", "95 % interval"), constants, "The fit", text=(0, 1)),
            Table(header, runs, "The training runs that were fitted", text=()),
        ]

    def _by_size(self) -> dict[float, list[Point]]:
        ordered = sorted(self.fit.points, key=lambda point: (point.parameters, point.tokens))
        sizes = dict.fromkeys(point.parameters for point in ordered)
        return {size: [point for point in ordered if point.parameters == size] for size in sizes}

    def _residual(self, point: Point) -> float:
        return point.loss / self.fit.predict(point.parameters, point.tokens) - 1

    def panels(self) -> list[Panels]:
        losses = [self._losses(*each) for each in AGAINST.items()]
        return [*losses, self._isoflops(), self._optima(), self._runs(), self._residuals()]

    def _losses(self, amount: str, axis: Axis) -> Panels:
        series, sizes = list[Series](), self._by_size()
        for number, (size, runs) in enumerate(sizes.items()):
            colour = _shade(number / max(len(sizes) - 1, 1))
            each = float(np.mean([getattr(run, amount) / run.tokens for run in runs]))
            tokens = _spread([run.tokens for run in runs], LINE)
            line = [(each * count, self.fit.predict(size, count)) for count in tokens]
            series.append(Series(points=line, look=Look(colour, width=1.3), labels=[*[""] * (LINE - 1), short(size)]))
            measured = [(getattr(run, amount), run.loss) for run in runs]
            series.append(Series(points=measured, look=Look(colour, "o", width=0)))
        if self.check:
            run = self.check.measured
            at, star = getattr(run, amount), Look("c1", "*", width=0)
            series.append(Series(points=[(at, end) for end in self.check[2:]], look=Look("c1", "_")))
            series.append(Series(points=[(at, run.loss)], look=star, labels=[short(run.parameters)]))
        plot = Plot(f"Bits per byte against {axis.label.split(' ')[0]}, by parameters", series, axis, BITS, size=SIZE)
        return Panels("scaling-loss" if amount == "flops" else f"scaling-loss-{amount}", TEXTS["scaling-loss"], [plot])

    def _isoflops(self) -> Panels:
        points, series = self.fit.points, list[Series]()
        spent, sizes = ([getattr(point, amount) for point in points] for amount in ("flops", "parameters"))
        budgets, widths = _spread(spent, ISOFLOPS), _spread(sizes, LINE)
        nearest = [min(budgets, key=lambda one: abs(math.log(flops / one))) for flops in spent]
        for number, budget in enumerate(budgets):
            colour, best = _shade(number / (ISOFLOPS - 1)), self.fit.optimal(budget)
            line = [(size, self.fit.predict(size, budget / 6 / size)) for size in widths]
            near = [(run.parameters, run.loss) for run, its in zip(points, nearest, strict=True) if its == budget]
            series.append(
                Series(points=line, look=Look(colour, width=1.3), labels=[*[""] * (LINE - 1), scientific(budget)])
            )
            series.append(Series(points=near, look=Look(colour, "o", width=0)))
            if widths[0] <= best[0] <= widths[-1]:
                series.append(Series(points=[(best[0], self.fit.predict(*best))], look=Look("c1", "D", width=0)))
        plot = Plot("Bits per byte against parameters, by FLOPs", series, PARAMETERS, BITS, size=SIZE)
        return Panels("scaling-isoflops", TEXTS["isoflops"], [plot])

    def _optima(self) -> Panels:
        spent = [point.flops for point in self.fit.points]
        budgets = _spread([min(spent), max(FURTHER * max(spent), 1.5 * self.budget)], LINE)
        best = [(flops, self.fit.optimal(flops)[0]) for flops in budgets]
        asked = [(self.budget, self.fit.optimal(self.budget)[0])]
        series = [
            Series(points=best, band=[self.fit.optimal_interval(flops) for flops in budgets]),
            Series(points=asked, look=Look("c1", "D", width=0), labels=[short(asked[0][1])]),
        ]
        marks = [(max(spent), "the largest training run")]
        plot = Plot("Optimal size for a budget", series, FLOPS, PARAMETERS, marks, SIZE)
        return Panels("scaling-optimum", TEXTS["optima"], [plot])

    def _runs(self) -> Panels:
        budgets = [point.flops for point in (*self.fit.points, *([self.check.measured] if self.check else []))]
        best = [self.fit.optimal(flops) for flops in _spread(budgets, LINE)]
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
        tokens = Axis("tokens", log=True, named=short, pad=0.08)
        return Panels(
            "scaling-runs", TEXTS["trained"], [Plot("What was trained", series, tokens, PARAMETERS, size=SIZE)]
        )

    def _residuals(self) -> Panels:
        about = "A good fit leaves no pattern: as many marks above zero as below, at low losses and at high ones."
        left = [(point.loss, 100 * self._residual(point)) for point in self.fit.points]
        most = max(0.1, *(abs(y) for _, y in left)) * 1.2
        series = [Series(points=left, look=Look(marker="o", width=0)), Series(look=Look("ink", width=0.9), level=0.0)]
        x, y = Axis("measured bits per byte"), Axis("%", holds=(-most, most))
        return Panels("scaling-residuals", about, [Plot("Residuals: measured less predicted", series, x, y, size=SIZE)])


def _spread(values: Sequence[float], count: int) -> list[float]:
    """From the least to the largest, evenly on a logarithmic axis."""
    return [float(value) for value in np.geomspace(min(values), max(values), count)]


def _shade(part: float) -> str:
    """A shade for a part of a whole: the strongest for 1, and one that can still be read for 0."""
    return f"{50 + 50 * part:.0f}%"


def ladder(experiment: Experiment, sizes: int) -> Experiment:
    """The comparison of `sizes` sizes of the one contender, the largest of which has the whole budget."""
    if len(experiment.contenders) != 1 or experiment.vary:
        raise ConfigError("a scaling law is of one family: give one preset or recipe")
    if experiment.budget.flops is None:
        raise ConfigError("a ladder's budget is in FLOPs, those of its largest run: give --flops, for instance 1e13")
    if experiment.rungs < MIN_VALUES:
        raise ConfigError(f"--rungs {experiment.rungs}: a law needs three lengths of training or more")
    if not 3 <= sizes <= MAX_SIZES:
        raise ConfigError(f"--sizes {sizes}: a law needs three sizes or more, {MAX_SIZES} at most, each twice the last")
    (base,) = experiment.contenders.values()
    largest = math.sqrt(experiment.budget.flops / (6 * TOKENS_PER_PARAMETER))
    wanted = [largest * SPREAD**-rung for rung in reversed(range(sizes))]
    contenders = {short(size): base.replace(parameters=size).model_dump() for size in wanted}
    return experiment.replace(contenders=contenders, budget={"tokens": round(experiment.budget.flops / (6 * largest))})


def scale(experiment: Experiment, place: Workplace, sizes: int = 5) -> ScalingPage:
    """Train the ladder, fit the law, and train the size that it finds best for a budget three times as large."""
    asked = ladder(experiment, sizes)
    data = place.out / "data"
    with claimed_folder(place.out, f"{LADDER}/{PLAN}"):
        check_budget(experiment, sizes, data)
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
    return ScalingPage(law, check, budget, (parameters, tokens), found.command, found.facts, found.notes)


def check_budget(experiment: Experiment, sizes: int, data: Path) -> None:
    """Refuse a budget in which a size of the ladder is too small, or a length too short, and name one that will do."""
    given = needed = experiment.budget.amount
    while True:
        asked = ladder(experiment.replace(budget={"flops": needed}), sizes)
        try:
            ready = make_ready(asked, data, pick_device().type, log_to_stderr)
            step, parameters = max(each.tokens_per_step for each in ready), 0.0
            if asked.budget.amount >= step * RATIO ** (asked.rungs - 1):
                break
        except TooSmallError as error:
            step, parameters = error.tokens, error.parameters
        tokens = step * RATIO ** (asked.rungs - 1)
        largest = max(parameters * SPREAD ** (sizes - 1), tokens / TOKENS_PER_PARAMETER)
        digit = 10.0 ** (math.floor(math.log10(needed := 6 * TOKENS_PER_PARAMETER * largest**2)) - 1)
        needed = math.ceil(1.01 * needed / digit) * digit
    if needed > given:
        family, smaller = next(iter(experiment.contenders)), "fewer --sizes or --rungs, or a smaller batch.size"
        raise ConfigError(
            f"--budget {given:.3g}: too small for {sizes} sizes of {family}, each trained for {asked.rungs} lengths of "
            f"a step or more; give --budget {needed:.2g} or more, or {smaller}"
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
