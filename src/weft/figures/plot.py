"""Charts described as data: lines, bands, marks and bars on even or logarithmic axes.

`figures/shapes.py` lays a chart out, and writes it as SVG for a page; `figures/charts.py` draws the same for print.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Point = tuple[float, float]
MAX_MARKED = 40  # points of a line that are still marked one by one
MAX_TICKS = 9  # at whole numbers
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Look(NamedTuple):
    """How a series is drawn. Its colour is one of web/page.css, c0 … c3, ink or soft, or a shade such as 85%.

    A marker is one of those in `figures/shapes.py`, a dash is as in SVG. Without a width there is no line.
    """

    colour: str = "c0"
    marker: str = ""
    dash: str = ""
    width: float = 1.8


PLAIN = Look()
LOOKS = (Look("c0", "s"), Look("c1", "^", "6 3"), Look("c2", "D", "7 2 1.5 2"), Look("c3", "v", "1.5 2.5"))


@dataclass(frozen=True)
class Series:
    """A line through `points`, with (low, high) around each as a `band`, and texts above them as `labels`.

    A `level` is a value to compare with: a line from edge to edge. What lies in the `background` does not widen the
    axes. With `bars` each point is the top of one.
    """

    name: str = ""
    points: Sequence[Point] = ()
    look: Look = PLAIN
    band: Sequence[Point] = ()
    labels: Sequence[str] = ()
    level: float | None = None
    background: bool = False
    bars: bool = False


def tick_text(value: float) -> str:
    """A number beside an axis: 25k, 1.5M, 5e-5."""
    if abs(value) >= 1e4:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:.6g}".replace("e-0", "e-")


def scientific(number: float) -> str:
    """2e14 → '2·10¹⁴'."""
    digits, _, power = f"{number:.2e}".partition("e")
    head, small = f"{float(digits):g}", str(int(power)).translate(SUPERSCRIPTS)
    return f"10{small}" if head == "1" else f"{head}·10{small}"


def multiple(number: float) -> str:
    """2 → '2×'."""
    return f"{number:g}×"


def signed(number: float) -> str:
    """0.5 → '+0.5'."""
    return f"{number:+g}" if number else "0"


def plain(number: float) -> str:
    """A number in a table, in three digits: 0.00995, 1.30, 12,400; 1.2·10⁻⁵ where there would be many zeros."""
    if number and math.isfinite(number) and not 1e-4 <= abs(number) < 1e7:
        return scientific(number)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.3g}".removesuffix(".")


def thinned(ys: Sequence[float | None], most: int) -> list[int]:
    """Which of many values to keep, at most so many: of each stretch the lowest and the highest, so no spike goes."""
    if len(ys) <= most:
        return list(range(len(ys)))
    size = -(-len(ys) // (most // 2 - 1))
    kept = {0, len(ys) - 1}
    for start in range(0, len(ys), size):
        known = [(y, at) for at, y in enumerate(ys[start : start + size], start) if y is not None and math.isfinite(y)]
        kept |= {min(known)[1], max(known)[1]} if known else {start}
    return sorted(kept)


@dataclass(frozen=True)
class Axis:
    """`holds` are values that it reaches though nothing is drawn there; `ticks` are names in the place of numbers.

    `pad` is the share of its range that is left free at an end, unless the end is one of what it `holds`. One that
    `clips` ends below a few values that are far above all others, and marks them at the edge.
    """

    label: str = ""
    log: bool = False
    named: Callable[[float], str] = tick_text
    holds: Sequence[float] = ()
    ticks: Mapping[float, str] | None = None
    pad: float = 0.04
    clips: bool = False

    def limits(self, values: Sequence[float]) -> Point:
        """Where it begins and ends."""
        every = [*values, *self.holds]
        low, high = min(every), max(every)
        if low == high:
            return (low / 1.1, high * 1.1) if self.log else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))
        margin = (high / low) ** self.pad if self.log else self.pad * (high - low)
        wider = (low / margin, high * margin) if self.log else (low - margin, high + margin)
        return low if low in self.holds else wider[0], high if high in self.holds else wider[1]

    def round_numbers(self, limits: Point, most: int) -> dict[float, str]:
        """At most so many ticks between its ends, as they are written."""
        found = log_ticks(*limits, most) if self.log else even_ticks(*limits, most)
        return {tick: self.named(tick) for tick in found}


def even_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in low … high at equal distances."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= raw * 0.999)
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(f"{number * step:.12g}") for number in numbers]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in low … high for a logarithmic axis: powers of ten, with 3, or 2 and 5, between where they fit."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil(math.log10(high / low) / most))  # decades from one tick to the next
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5)) if stride == 1 else ((1,),):
        ticks = [step * 10.0**power for power in range(first - first % stride, last + 1, stride) for step in steps]
        ticks = [tick for tick in ticks if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]
        found = ticks if len(ticks) <= most or not found else found
    # so narrow a range is nearly even
    return found if len(found) >= 3 or high > 8 * low else even_ticks(low, high, min(most, 5))


@dataclass(frozen=True)
class Plot:
    """A chart. `marks` are values of the horizontal axis at which something happened, each with a text."""

    title: str
    series: Sequence[Series]
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    marks: Sequence[tuple[float, str]] = ()
    size: tuple[int, int] = (480, 290)


class Whisker(NamedTuple):
    """A value with its interval; beyond what was measured, only the side on which the value lies is known."""

    name: str
    value: float
    low: float
    high: float
    look: Look
    beyond: str | None = None


def whiskers(title: str, rows: Sequence[Whisker], x: Axis, neutral: float) -> Plot:
    """A row each, from the top, under its name. An interval that ends beyond what was measured goes to the edge."""
    known = [value for row in rows for value in (row.value, row.low, row.high) if math.isfinite(value)]
    low, high = replace(x, pad=0.1).limits([neutral, *(value for value in known if value > 0 or not x.log)])
    series = [Series(points=[(neutral, 0.7), (neutral, 0.4 - len(rows))], look=Look("ink", width=1))]
    for place, row in enumerate(rows):
        marker = {"above": ">", "below": "<"}.get(row.beyond or "", row.look.marker)
        if row.beyond is None:
            ends = [(max(row.low, low), -place), (min(row.high, high), -place)]
            series.append(Series(points=ends, look=Look(row.look.colour, "|")))
        series.append(Series(points=[(row.value, -place)], look=row.look._replace(marker=marker)))
    y = Axis(ticks={-place: row.name for place, row in enumerate(rows)}, holds=(0.8, 0.4 - len(rows)))
    return Plot(title, series, replace(x, holds=(low, high)), y, size=(480, 92 + 40 * len(rows)))


def bars(title: str, values: Mapping[str, float], x_label: str, y_label: str) -> Plot:
    """A bar for each name."""
    x = Axis(x_label, ticks=dict(enumerate(values)), holds=(-0.5, len(values) - 0.5))
    return Plot(title, [Series(points=list(enumerate(values.values())), bars=True)], x, Axis(y_label, holds=(0.0,)))


def lines(title: str, values: Mapping[str, Collection[float]], xs: Collection[float], x: Axis, y: Axis) -> Plot:
    """A line for each name, through its values at `xs`; those of few points mark them."""
    series = []
    for number, (name, ys) in enumerate(values.items()):
        look, other = LOOKS[number % len(LOOKS)], LOOKS[(number + number // len(LOOKS)) % len(LOOKS)]
        look = look._replace(marker=other.marker if len(ys) <= MAX_MARKED else "", dash=other.dash)
        series.append(Series(name, list(zip(map(float, xs), map(float, ys), strict=False)), look))
    return Plot(title, series, x, y)


def whole_numbers(label: str, count: int) -> Axis:
    """An axis of 0 … count − 1, with ticks at whole numbers alone."""
    return Axis(label, ticks={number: str(number) for number in range(0, count, -(-count // MAX_TICKS))})
