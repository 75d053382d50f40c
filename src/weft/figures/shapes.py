"""A chart laid out as shapes, and the shapes as SVG in the colours of the page, which suits light and dark.

A report is written at every evaluation, so nothing here loads matplotlib.
"""

import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from weft.figures.page import html_charts, mounted, template
from weft.figures.plot import Axis, Look, Plot, Point, Series, thinned

MAX_POINTS = 500  # of a line; more are thinned
MAX_DATA = 2000  # points of a line whose values a page has
EDGE, GAP = 14.0, 17.0  # around everything; from one line of text to the next
LETTER, BOLD = 7.0, 9.2  # width of one, about; in a title
ARROW = 44.0  # width of one with the number beside it
BARE = Look("", width=1.0)  # of what is no part of a series
AREAS, TEXTS = ("band", "bar"), ("title", "name", "tick")  # kinds of shapes


class Shape(NamedTuple):
    """A line, an area, a marker (of kind dot) or a text. Its kind is its class on a page.

    `text` is what a text says, or what shows when anything else is pointed at. A text's start, middle or end stands at
    its place. What is `cut` ends at the edges of the box.
    """

    kind: str
    places: Sequence[Point]
    look: Look = BARE
    text: str = ""
    anchor: str = "start"
    angle: float = 0.0
    cut: bool = False


class Layout(NamedTuple):
    """The box that series are drawn in (x, y, width, height), and all shapes in the order in which they are drawn."""

    box: tuple[float, float, float, float]
    shapes: list[Shape]


def laid_out(plot: Plot) -> Layout | None:
    """A chart on a plane of its size; None where no series has a point to draw."""

    def has_place(point: Point) -> bool:
        on_axes = zip(point, (plot.x, plot.y), strict=True)
        return all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in on_axes)

    series = [replace(each, points=[*filter(has_place, each.points)]) for each in plot.series]
    front = [each for each in series if not each.background]
    xs, ys = ([point[axis] for each in front for point in each.points] for axis in (0, 1))
    if not xs:
        return None
    top = math.inf
    if plot.y.clips:  # a few spikes, far above nine tenths of the values, must not flatten the rest
        high = sorted(ys)[int(0.9 * (len(ys) - 1))]
        top = high + 4 * max(high - min(ys), abs(high) * 0.05)
    held = [end for each in front for ends in each.band for end in ends]
    held += [each.level for each in front if each.level is not None]
    frame = _Frame(plot, plot.x.limits(xs), plot.y.limits([*(y for y in ys if y <= top), *held]))
    drawn = [shape for each in sorted(series, key=lambda each: not each.background) for shape in frame.drawn(each)]
    # lines are cut together; marks and then texts stand on top
    order = {"dot": 2} | dict.fromkeys(TEXTS, 3)
    every = [
        shape for shape in (*frame.around(), *drawn, *frame.outliers(front)) if shape.text or shape.kind not in TEXTS
    ]
    ordered = sorted(every, key=lambda shape: order.get(shape.kind, int(shape.cut)))
    return Layout((frame.left, frame.top, frame.right - frame.left, frame.foot - frame.top), ordered)


class _Frame:
    """Where everything stands in a chart: the box that series are drawn in, and what is around it."""

    def __init__(self, plot: Plot, x_limits: Point, y_limits: Point) -> None:
        self.plot, self.x_limits, self.y_limits = plot, x_limits, y_limits
        width, height = plot.size
        titles = textwrap.wrap(plot.title, int((width - 2 * EDGE) / BOLD), max_lines=2, placeholder=" …")
        self.texts = [Shape("title", [(EDGE, 22 + GAP * row)], BARE, line) for row, line in enumerate(titles)]
        self.top = 22 + GAP * (len(titles) - 1)
        self._add_names([each for each in plot.series if each.name])
        self.top += 20 if plot.y.clips else 14  # with space for what lies above
        self.rows = plot.y.ticks or plot.y.round_numbers(y_limits, max(2, int((height - self.top - 40) // 32)))
        beside = 0.0 if plot.y.ticks else LETTER * max(map(len, self.rows.values()), default=0) + 6
        self.left, self.right = EDGE + beside + (GAP + LETTER if plot.y.label else 0), width - EDGE - 6
        several, wide = (plot.x.round_numbers(x_limits, most) for most in range(7, 0, -1)), self.right - self.left
        self.columns = plot.x.ticks or next((ticks for ticks in several if _width_of(ticks.values()) <= wide), {})
        self.tilted = _width_of(self.columns.values()) > wide
        under = 0.65 * (LETTER + 1) * max(map(len, self.columns.values()), default=0) + 15 if self.tilted else GAP
        self.foot = height - 9 - under - (GAP if plot.x.label else 0)

    def _add_names(self, named: Sequence[Series]) -> None:
        """Those of several series, one after another under the title, in as many lines as they need."""
        if len(named) < 2:
            return
        x, self.top = EDGE, self.top + GAP + 2
        for each in named:
            name, y = self._fitting(each.name), self.top
            if x > EDGE and x + 25 + LETTER * len(name) > self.plot.size[0] - EDGE:
                x, y = EDGE, y + GAP
            self.texts += [Shape("line", [(x, y - 4), (x + 20, y - 4)], each.look)] if each.look.width else []
            self.texts += [Shape("dot", [(x + 10, y - 4)], each.look)] if each.look.marker else []
            self.texts.append(Shape("name", [(x + 25, y)], BARE, name))
            x, self.top = x + 25 + LETTER * len(name) + 14, y

    def _fitting(self, name: str) -> str:
        most = int((self.plot.size[0] - 2 * EDGE - 25) / LETTER)
        return name if len(name) <= most else f"{name[: most - 1]}…"

    def around(self) -> Iterator[Shape]:
        plot, left, right, top, foot = self.plot, self.left, self.right, self.top, self.foot
        yield from self.texts
        for tick, name in self.rows.items():
            y = self.y_of(tick)
            if plot.y.ticks:  # names stand above what they name
                yield Shape("name", [(left, y - 9)], BARE, self._fitting(name))
            else:
                yield Shape("grid", [(left, y), (right, y)])
                yield Shape("tick", [(left - 6, y + 4)], BARE, name, "end")
        for tick, name in self.columns.items():
            x = self.x_of(tick)
            yield Shape("grid", [(x, top), (x, foot)]) if plot.y.ticks else Shape("axis", [(x, foot), (x, foot + 4)])
            tilted = Shape("tick", [(x + 4, foot + 14)], BARE, name, "end", -40)
            yield tilted if self.tilted else Shape("tick", [(x, foot + 18)], BARE, name, "middle")
        yield Shape("axis", [(left, foot), (right, foot)])
        yield Shape("tick", [(right, plot.size[1] - 9)], BARE, plot.x.label, "end")
        yield Shape("tick", [(EDGE + 8, (top + foot) / 2)], BARE, plot.y.label, "middle", -90)
        for value, text in plot.marks:
            x = self.x_of(min(max(value, self.x_limits[0]), self.x_limits[1]))
            yield Shape("mark", [(x, top), (x, foot)], text=text)

    def x_of(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * _share(value, self.x_limits, self.plot.x.log), 1)

    def y_of(self, value: float) -> float:
        return round(self.foot + (self.top - self.foot) * _share(value, self.y_limits, self.plot.y.log), 1)

    def drawn(self, series: Series) -> Iterator[Shape]:
        look, places = series.look, [(self.x_of(x), self.y_of(y)) for x, y in series.points]
        if series.level is not None:
            y = self.y_of(series.level)
            yield Shape("line", [(self.left, y), (self.right, y)], look, cut=True)
        if series.band:
            ends = [(x, *map(self.y_of, band)) for (x, _), band in zip(places, series.band, strict=True)]
            around = [*((x, low) for x, low, _ in ends), *((x, high) for x, _, high in reversed(ends))]
            yield Shape("band", around, look, cut=True)
        if series.bars:
            half = round(0.35 * (self.right - self.left) / len(places), 1)
            for x, y in places:
                left, right = x - half, x + half
                yield Shape("bar", [(left, self.foot), (left, y), (right, y), (right, self.foot)], look, cut=True)
        elif look.width and len(places) > 1:
            yield Shape("faint" if series.background else "line", _thinned(places), look, cut=True)
        for (x, y), place in zip(series.points, places, strict=True) if look.marker else ():
            if self.top <= place[1] <= self.foot:
                yield Shape("dot", [place], look, f"{self.plot.x.named(x)}: {y:.4g}")
        for (x, y), label in zip(places, series.labels, strict=False):
            half = LETTER * len(label) / 2
            late, early = x + half > self.right, x - half < self.left
            at = self.right if late else self.left if early else x
            yield Shape("tick", [(at, y - 8)], look, label, "end" if late else "start" if early else "middle")

    def outliers(self, every: Sequence[Series]) -> Iterator[Shape]:
        """What lies above the chart as arrows at its edge, each with its value; of neighbours the highest."""
        taken, arrow = list[float](), Look("c1", "^")
        above = [point for series in every for point in series.points if point[1] > self.y_limits[1]]
        for x, value in sorted(above, key=lambda point: -point[1]):
            at = self.x_of(x)
            late = at > self.right - ARROW
            if any(abs(at - other) < (2 if max(at, other) > self.right - ARROW else 1) * ARROW for other in taken):
                continue
            taken.append(at)
            yield Shape("dot", [(at, self.top - 5)], arrow, f"{self.plot.x.named(x)}: {value:.4g}")
            beside = [(at - 7 if late else at + 7, self.top - 1)]
            yield Shape("tick", beside, arrow, f"{value:.3g}", "end" if late else "start")


def _share(value: float, limits: Point, log: bool) -> float:
    """How far along its axis a value lies: 0 at the beginning, 1 at the end."""
    low, high = limits
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def _width_of(names: Collection[str]) -> float:
    return len(names) * ((LETTER + 1) * max(map(len, names), default=0) + 6)


def _thinned(places: list[Point]) -> list[Point]:
    size = -(-len(places) // MAX_POINTS)
    if size <= 1:
        return places
    groups = [places[at : at + size] for at in range(0, len(places), size)]
    return [(group[-1][0], round(sum(y for _, y in group) / len(group), 1)) for group in groups]


def plot_svg(plot: Plot) -> Markup:
    """A chart as a part of a page; nothing where there is nothing to draw."""
    layout = laid_out(plot)
    if layout is None:
        return Markup("")
    groups = [(cut, list(some)) for cut, some in groupby(layout.shapes, key=lambda shape: shape.cut)]
    known = {"areas": AREAS, "texts": TEXTS, "g": "{:g}".format, "points": _points}
    return Markup(template("chart_svg.html").render(plot=plot, box=layout.box, groups=groups, **known))


def _points(places: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def html_plot(plot: Plot) -> Markup:
    """A chart that web/chart.js makes one that can be read and zoomed; nothing where there is nothing to draw."""
    fallback = plot_svg(plot)
    return mounted("chart.js", plot_data(plot), fallback) if fallback else fallback


def html_plots(plots: Sequence[Plot], kind: str = "") -> Markup:
    """Charts side by side, or one below another on a narrow page."""
    return html_charts([html_plot(plot) for plot in plots], kind)


def plot_data(plot: Plot) -> dict[str, Any]:
    """A chart as JSON has it: what web/chart.js draws. Of very long series the lowest and highest points are in it."""
    axes = {name: _axis_data(axis) for name, axis in (("x", plot.x), ("y", plot.y))}
    series = list(map(_series_data, plot.series))
    return {"title": plot.title, "size": plot.size, **axes, "series": series, "marks": plot.marks}


def _axis_data(axis: Axis) -> dict[str, Any]:
    ticks = None if axis.ticks is None else list(axis.ticks.items())
    given = {"log": axis.log, "ticks": ticks, "clips": axis.clips, "label": axis.label, "holds": list(axis.holds)}
    return {"named": axis.named.__name__, "pad": axis.pad, **{key: value for key, value in given.items() if value}}


def _series_data(series: Series) -> dict[str, Any]:
    known = [n for n, (x, _) in enumerate(series.points) if math.isfinite(x)]
    kept = [known[at] for at in thinned([series.points[n][1] for n in known], MAX_DATA)]
    labels = [(series.labels[n] if n < len(series.labels) else "") for n in kept] if series.labels else None
    given: dict[str, Any] = {
        "name": series.name,
        "x": [_rounded(series.points[n][0]) for n in kept],
        "y": [_rounded(series.points[n][1]) for n in kept],
        "band": [[_rounded(end) for end in series.band[n]] for n in kept] if series.band else None,
        "labels": labels,
        "background": series.background,
        "bars": series.bars,
    }
    level = {} if series.level is None else {"level": _rounded(series.level)}
    return {"look": series.look._asdict(), **level, **{key: value for key, value in given.items() if value}}


def _rounded(value: float) -> float | None:
    """As many digits as can be told apart; JSON has no NaN."""
    return value if isinstance(value, int) else float(f"{value:.8g}") if math.isfinite(value) else None
