"""Accuracy of a model by ability and distance: a curve for each, between chance and the ceiling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.errors import counted
from weft.evaluate.abilities.tasks import Ability
from weft.evaluate.minimal_pairs import Accuracy
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.tables import Table

CEILING = 100  # % of questions; every question has one right answer
SHARE = Axis("% right", includes=(0.0, 100.0))
CHANCE, CURVE = Look("soft", dash="2 3", width=1.2), Look("c0", "s")


class AbilityPoint(NamedTuple):
    """Share of right answers at a distance, with a 95 % interval over questions; ties are shared."""

    distance: int
    questions: int
    accuracy: float
    low: float
    high: float


class AbilityCurve(NamedTuple):
    """Points of an ability by distance; without any, the reason why it was not asked for is `skipped`."""

    task: Ability
    points: Sequence[AbilityPoint] = ()
    skipped: str = ""
    overall: Accuracy | None = None  # over the questions at all distances

    @property
    def reach(self) -> int | None:
        """Largest distance up to which the model is above chance, by the interval; None if it never is."""
        reached = None
        for point in self.points:
            if point.low <= self.task.chance:
                break
            reached = point.distance
        return reached


def curve(task: Ability, values: Mapping[int, Sequence[float]]) -> AbilityCurve:
    """Return the curve of the values of answers, 1 if right, by distance."""
    points = [AbilityPoint(distance, *Accuracy.of(each)) for distance, each in values.items()]
    return AbilityCurve(task, points, overall=Accuracy.of([value for each in values.values() for value in each]))


def answer_value(scores: Sequence[float]) -> float:
    """Return 1 if the first score, the right answer's, is the highest; a share of 1 in a tie with others."""
    best = max(scores)
    return (scores[0] == best) / sum(score == best for score in scores)


@dataclass(frozen=True)
class Abilities(Charts):
    """Curves of a model's abilities."""

    model: str
    curves: Sequence[AbilityCurve]
    remarks: Sequence[str] = ()

    title = "Abilities"
    about = (
        "Sequences made by a random generator, each with one right continuation among a few. A curve shows how often a "
        "model finds it likeliest, by distance; the band is the 95% interval, the dashed line chance. A model that "
        "follows the rule is always right."
    )

    def charts(self) -> list[Plot]:
        return [
            ability_plot(each.task, {"": (each, CURVE)}, size=(320, 240)) for each in self.curves if not each.skipped
        ]

    def tables(self) -> list[Table]:
        rows = []
        for task, points, skipped, overall in self.curves:
            by_distance = "   ".join(f"{point.distance}: {point.accuracy:.0%}" for point in points)
            mean = "" if overall is None else f"{overall.accuracy:.1%}"
            interval = "" if overall is None else f"{overall.low:.1%}–{overall.high:.1%}"
            told = f"skipped: {skipped}" if skipped else by_distance
            rows.append((task.name, f"{task.chance:.0%}", f"{CEILING}%", mean, interval, told))
        header = ("ability", "chance", "ceiling", "right", "95% interval", "by distance")
        return [Table(header, rows, "", self.remarks, text=(0, 5), spare=(2, 4))]

    def record(self, details: bool = False) -> dict[str, Any]:
        """Return plain values, for JSON; `details` adds what each ability is."""
        abilities = []
        for each in self.curves:
            task = each.task._asdict() if details else {"name": each.task.name, "unit": each.task.unit}
            named = {"chance": each.task.chance, "ceiling": CEILING / 100, "reach": each.reach, "skipped": each.skipped}
            named |= {"accuracy": None if each.overall is None else each.overall.accuracy}
            abilities.append({**task, **named, "points": [point._asdict() for point in each.points]})
        return {"model": self.model, "abilities": abilities, "remarks": list(self.remarks)}


def ability_plot(
    task: Ability, curves: Mapping[str, tuple[AbilityCurve, Look]], size: tuple[int, int] = (480, 290)
) -> Plot:
    """Plot the curves of one ability, of one model or of several by name."""
    series = [Series("" if len(curves) == 1 else "chance", look=CHANCE, level=100 * task.chance)]
    for name, (each, look) in curves.items():
        points = [(position, 100 * point.accuracy) for position, point in enumerate(each.points)]
        band = [(100 * point.low, 100 * point.high) for point in each.points] if len(curves) == 1 else []
        series.append(Series(name, points, look, band))
    longest = max((each.points for each, _ in curves.values()), key=len)
    ticks = {float(position): str(point.distance) for position, point in enumerate(longest)}
    return Plot(task.name, series, Axis(task.unit, ticks=ticks, pad=0.08), SHARE, size=size)


class Appearance(NamedTuple):
    """Accuracies of one ability, or one group of pairs, at every checkpoint."""

    name: str
    chance: float
    accuracies: Sequence[Accuracy]

    @property
    def first(self) -> int | None:
        """Index of the checkpoint from which on the interval is above chance; None if it never is."""
        above = [accuracy.low > self.chance for accuracy in self.accuracies]
        return len(above) - above[::-1].index(False) if not all(above) and above[-1] else 0 if all(above) else None


@dataclass(frozen=True)
class OverTime(Charts):
    """Abilities or minimal pairs at the checkpoints of a run, beside the loss."""

    model: str
    steps: Sequence[int]
    losses: Sequence[float | None]  # validation loss at each step, if it was measured
    curves: Sequence[Appearance]

    title = "Over time"
    about = (
        "Accuracy at every checkpoint, with its 95% interval, beside the validation loss. A dashed line is chance. An "
        "ability has appeared at the first checkpoint from which on the whole interval is above chance."
    )

    def charts(self) -> list[Plot]:
        measured = [(float(step), loss) for step, loss in zip(self.steps, self.losses, strict=True) if loss is not None]
        step, plots = Axis("step"), []
        if measured:
            plots.append(Plot("validation loss", [Series(points=measured, look=Look("ink", "o"))], step, Axis("nats")))
        for name, chance, accuracies in self.curves:
            points = [(float(step), 100 * each.accuracy) for step, each in zip(self.steps, accuracies, strict=True)]
            band = [(100 * each.low, 100 * each.high) for each in accuracies]
            series = [Series(look=CHANCE, level=100 * chance), Series("", points, CURVE, band)]
            plots.append(Plot(name.replace("_", " "), series, step, SHARE))
        return plots

    def tables(self) -> list[Table]:
        rows = []
        for each in self.curves:
            first, (*_, last) = each.first, each.accuracies
            loss = None if first is None else self.losses[first]
            step = "never" if first is None else f"{self.steps[first]:,}"
            shown = "" if loss is None else f"{loss:.3f}"
            rows.append((each.name.replace("_", " "), f"{each.chance:.0%}", step, shown, f"{last.accuracy:.1%}"))
        header = ("", "chance", "above it from step", "loss there", f"at step {self.steps[-1]:,}")
        return [Table(header, rows, f"{counted(len(self.steps), 'checkpoint')} of {self.model}")]

    def record(self, details: bool = False) -> dict[str, Any]:
        """Return plain values, for JSON."""
        curves = []
        for each in self.curves:
            named = {"name": each.name, "chance": each.chance}
            appears = None if each.first is None else self.steps[each.first]
            curves.append({**named, "appears": appears, "accuracies": [point._asdict() for point in each.accuracies]})
        return {"model": self.model, "steps": list(self.steps), "losses": list(self.losses), "curves": curves}
