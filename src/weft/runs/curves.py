"""Line charts as SVG that takes its colours from the page, so that it suits light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from jinja2 import Environment, Template

LEFT, RIGHT, TOP, FOOT = 62, 456, 52, 250  # of the lines, as in chart.svg
MOST_POINTS = 500


@dataclass(frozen=True)
class Series:
    """A named line through points (x, y). `dots` marks each point: for values measured now and then.

    A line needs two points; of a single one its name tells the value. `level` is a value that all others compare with:
    a dashed line from edge to edge."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    faint: bool = False
    level: float | None = None


def chart(
    title: str,
    series: Sequence[Series],
    *,
    logarithmic: bool = False,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """An <svg> element of lines over steps; empty text where no line has two points that are finite.

    `marks` are steps at which something happened, each with a text that shows when it is pointed at.
    """
    lines = [replace(s, points=_thin(_drawable(s.points, logarithmic))) for s in series]
    drawn = [line for line in lines if len(line.points) > 1]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ends = (min(xs), max(xs))
    lines = [line if line.level is None else replace(line, points=[(x, line.level) for x in ends]) for line in lines]
    lines = [_named(line) for line in lines if line.points]
    ys = [math.log10(y) if logarithmic else y for line in lines if len(line.points) > 1 for _, y in line.points]
    ys = _without_outliers(ys)
    ys = [10.0**y for y in ys] if logarithmic else ys
    if from_zero:
        ys.append(0.0)
    x_ticks = _powers(min(xs), max(xs)) if logarithmic else _ticks(min(xs), max(xs))
    y_ticks = _powers(min(ys), max(ys)) if logarithmic else []
    if len(y_ticks) < 3:  # less than a power of ten is nearly even
        y_ticks = _ticks(min(ys), max(ys))
    x_of = _scale(min(xs), max(xs), LEFT, RIGHT, logarithmic)
    y_of = _scale(min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys)), FOOT, TOP, logarithmic)
    return template("chart.svg").render(
        title=title,
        x_ticks=[(x_of(tick), _label(tick)) for tick in x_ticks],
        y_ticks=[(y_of(tick), _label(tick)) for tick in y_ticks],
        marks=[(x_of(min(max(x, min(xs)), max(xs))), text) for x, text in marks],
        lines=[(line, _places(line, x_of, y_of), legend) for line, legend in zip(lines, _legends(lines), strict=True)],
    )


@cache
def template(name: str) -> Template:
    """A template of this folder; what it is given is escaped."""
    text = (resources.files("weft") / "runs" / name).read_text("utf-8")
    return Environment(autoescape=True, trim_blocks=True).from_string(text)


def _named(line: Series) -> Series:
    if len(line.points) > 1 and line.level is None:
        return line
    return replace(line, name=f"{line.name} {line.points[0][1]:.4g}")


def _places(line: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[tuple[float, float]]:
    if len(line.points) < 2:
        return []
    return [(x_of(x), min(FOOT, max(TOP, y_of(y)))) for x, y in line.points]


def _legends(lines: Sequence[Series]) -> list[float]:
    """Where each line's name begins: one after the other, under the title."""
    places, at = [], 34.0
    for line in lines:
        places.append(round(at, 1))
        at += 7.2 * len(line.name) + 34
    return places


# ---- numbers to places


def _drawable(points: Sequence[tuple[float, float]], logarithmic: bool) -> list[tuple[float, float]]:
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    return [(x, y) for x, y in finite if (x > 0 and y > 0) or not logarithmic]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS, each the mean of its neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _without_outliers(ys: list[float]) -> list[float]:
    """A few spikes must not flatten the rest: what lies far above nine tenths of the values is drawn at the edge."""
    ordered = sorted(ys)
    high = ordered[int(0.9 * (len(ordered) - 1))]
    limit = high + 4 * max(high - ordered[0], abs(high) * 0.05)
    return [y for y in ordered if y <= limit]


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """A value's place on an axis."""
    value_of = math.log10 if log else float
    first, width = value_of(low), value_of(high) - value_of(low)
    return lambda value: round(start + (end - start) * ((value_of(value) - first) / width if width else 0.5), 1)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers over low … high."""
    if low == high:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)] or [low, high]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten over low … high, with 2 and 5 between where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**n for n in range(first, last + 1)]
    between = powers if len(powers) > 4 else [m * p for p in powers for m in (1, 2, 5)]
    return [x for x in between if low <= x * (1 + 1e-9) and x <= high * (1 + 1e-9)] or [low, high]


def _label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 10_000:
        return f"{value / 1e3:g}k"
    return f"{value:.1e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.6g}"
