"""Charts as data: lines, bands, marks and bars on linear or logarithmic axes.

`figures/shapes.py` lays a chart out and writes it as SVG for a page; `figures/charts.py` draws the same shapes for
print.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft.figures.formats import FORMATS, Format

Point = tuple[float, float]
MAX_MARKED_POINTS = 40  # a line of more points has no markers
MAX_INTEGER_TICKS = 9


class Look(NamedTuple):
    """Style of a series. The colour is one of web/page.css (c0 … c3, ink, soft) or a shade such as 85%."""

    colour: str = "c0"
    marker: str = ""  # one of templates/chart_svg.html
    dash: str = ""  # as in SVG
    width: float = 1.8  # 0: no line is drawn


PLAIN = Look()
LOOKS = (Look("c0", "s"), Look("c1", "^", "6 3"), Look("c2", "D", "7 2 1.5 2"), Look("c3", "v", "1.5 2.5"))


@dataclass(frozen=True)
class Series:
    """Line through `points`."""

    name: str = ""
    points: Sequence[Point] = ()
    look: Look = PLAIN
    band: Sequence[Point] = ()  # (low, high) around each point
    labels: Sequence[str] = ()  # above the points
    level: float | None = None  # of a horizontal line from edge to edge
    background: bool = False  # does not widen the axes
    bars: bool = False  # each point is the top of a bar


@dataclass(frozen=True)
class Axis:
    """Axis of a chart."""

    label: str = ""
    log: bool = False
    format: Format = "number"
    includes: Sequence[float] = ()  # values that it reaches even if nothing is drawn there
    ticks: Mapping[float, str] | None = None  # names at given values, instead of numbers in `format`
    pad: float = 0.04  # share of the range left free at an end that is not in `includes`
    clips: bool = False  # it ends below a few outliers, which are marked at its edge

    def label_of(self, value: float) -> str:
        """Format a value of the axis."""
        return FORMATS[self.format](value)

    def limits(self, values: Sequence[float]) -> Point:
        """Return where the axis begins and ends."""
        every = [*values, *self.includes]
        low, high = min(every), max(every)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # they differ by rounding errors at most
            margin = abs(low) / 10 or 1
            return (low / 1.1, high * 1.1) if self.log else (low - margin, high + margin)
        margin = (high / low) ** self.pad if self.log else self.pad * (high - low)
        wider = (low / margin, high * margin) if self.log else (low - margin, high + margin)
        return low if low in self.includes else wider[0], high if high in self.includes else wider[1]

    def round_ticks(self, limits: Point, max_ticks: int) -> dict[float, str]:
        """Return at most `max_ticks` round numbers between the limits, with their labels."""
        ticks = log_ticks(*limits, max_ticks) if self.log else even_ticks(*limits, max_ticks)
        return {tick: self.label_of(tick) for tick in ticks}


def even_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return evenly spaced round numbers in [low, high]."""
    raw = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    multiples = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [_decimal(multiple * step) for multiple in multiples]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return round numbers in [low, high] for a logarithmic axis: powers of ten, with 3, or 2 and 5, if they fit."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil(math.log10(high / low) / max_ticks - 1e-9))  # decades between ticks
    ticks: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5)) if stride == 1 else ((1,),):
        powers = range(first - first % stride, last + 1, stride)
        every = [_decimal(digit * 10.0**power) for power in powers for digit in digits]
        inside = [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        ticks = inside if len(inside) <= max_ticks or not ticks else ticks
    # over a narrow range, a logarithmic axis is nearly linear
    return ticks if len(ticks) >= 3 or high > 8 * low else even_ticks(low, high, min(max_ticks, 5))


def _decimal(value: float) -> float:
    """Remove rounding errors: 0.30000000000000004 → 0.3."""
    return float(f"{value:.12g}")


def thin(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return at most `max_points` indices: the minimum and maximum of every stretch, so that no spike is lost."""
    if len(values) <= max_points:
        return list(range(len(values)))
    size = -(-len(values) // (max_points // 2 - 1))
    indices = {0, len(values) - 1}
    for start in range(0, len(values), size):
        stretch = enumerate(values[start : start + size], start)
        finite = [(value, index) for index, value in stretch if value is not None and math.isfinite(value)]
        indices |= {min(finite)[1], max(finite)[1]} if finite else {start}
    return sorted(indices)


@dataclass(frozen=True)
class Plot:
    """Chart. `marks` are positions on the horizontal axis at which something happened, each with a text."""

    title: str
    series: Sequence[Series]
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    marks: Sequence[tuple[float, str]] = ()
    size: tuple[int, int] = (480, 290)


class Whisker(NamedTuple):
    """Value with its interval; `beyond` is "above" or "below" if the value is outside the measured range."""

    name: str
    value: float
    low: float
    high: float
    look: Look
    beyond: str | None = None


def whiskers(title: str, rows: Sequence[Whisker], x: Axis, *, neutral: float) -> Plot:
    """Plot intervals in rows from the top, under their names; an unbounded interval ends at the edge of the chart."""
    values = [value for row in rows for value in (row.value, row.low, row.high) if math.isfinite(value)]
    low, high = replace(x, pad=0.1).limits([neutral, *(value for value in values if value > 0 or not x.log)])
    series = [Series(points=[(neutral, 0.7), (neutral, 0.4 - len(rows))], look=Look("ink", width=1))]
    for index, row in enumerate(rows):
        marker = {"above": ">", "below": "<"}.get(row.beyond or "", row.look.marker)
        if row.beyond is None:
            ends = [(max(row.low, low), -index), (min(row.high, high), -index)]
            series.append(Series(points=ends, look=Look(row.look.colour, "|")))
        series.append(Series(points=[(row.value, -index)], look=row.look._replace(marker=marker)))
    y = Axis(ticks={-index: row.name for index, row in enumerate(rows)}, includes=(0.8, 0.4 - len(rows)))
    return Plot(title, series, replace(x, includes=(low, high)), y, size=(480, 92 + 40 * len(rows)))


def bars(title: str, values: Mapping[str, float], x_label: str, *, y_label: str) -> Plot:
    """Plot one bar per name."""
    x = Axis(x_label, ticks=dict(enumerate(values)), includes=(-0.5, len(values) - 0.5))
    return Plot(title, [Series(points=list(enumerate(values.values())), bars=True)], x, Axis(y_label, includes=(0.0,)))


def lines(title: str, values: Mapping[str, Collection[float]], xs: Collection[float], *, x: Axis, y: Axis) -> Plot:
    """Plot one line per name, through its values at `xs`; lines of few points have markers."""
    series = []
    for index, (name, ys) in enumerate(values.items()):
        look, other = LOOKS[index % len(LOOKS)], LOOKS[(index + index // len(LOOKS)) % len(LOOKS)]
        look = look._replace(marker=other.marker if len(ys) <= MAX_MARKED_POINTS else "", dash=other.dash)
        series.append(Series(name, list(zip(map(float, xs), map(float, ys), strict=False)), look))
    return Plot(title, series, x, y)


def integer_axis(label: str, count: int) -> Axis:
    """Return an axis of 0 … count − 1 with ticks at integers only."""
    return Axis(label, ticks={index: str(index) for index in range(0, count, max(1, -(-count // MAX_INTEGER_TICKS)))})
