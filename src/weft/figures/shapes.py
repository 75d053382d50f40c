"""Lay a chart out as shapes, and write the shapes as SVG in the colours of the page, light or dark.

A report is written at every evaluation, so nothing here imports matplotlib.
"""

import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from weft.figures.formats import general
from weft.figures.page import html_charts, mount_point, template
from weft.figures.plot import Axis, Look, Plot, Point, Series, thin

# Lengths are in units of a plot's plane, as in web/chart_draw.js.
MAX_LINE_POINTS = 500  # points of a drawn line; more are averaged
MAX_DATA_POINTS = 2000  # points of a series that a page holds; more are thinned
EDGE, LINE_HEIGHT = 14.0, 17.0  # margin around everything; height of a line of text
LETTER_WIDTH, TITLE_LETTER_WIDTH = 7.0, 9.2  # approximate
MAX_LABEL_SHARE = 0.4  # of the width, for names of rows on the left
MIN_ROOM = 0.05  # share of its value over which a flat curve may be spread
OUTLIER_WIDTH = 44.0  # arrow and number of an outlier
BARE = Look("", width=1.0)  # of shapes that belong to no series
AREAS, TEXTS = ("band", "bar"), ("title", "name", "tick")  # kinds of shapes


class Shape(NamedTuple):
    """Line, area, marker (of kind "dot") or text; the kind is its CSS class on a page."""

    kind: str
    points: Sequence[Point]
    look: Look = BARE
    text: str = ""  # content of a text, tooltip of any other shape
    anchor: str = "start"  # of a text: start, middle or end
    angle: float = 0.0
    clipped: bool = False  # it ends at the edges of the chart's box


class ChartLayout(NamedTuple):
    """Box in which series are drawn (x, y, width, height), and all shapes in drawing order."""

    box: tuple[float, float, float, float]
    shapes: list[Shape]


def lay_out(plot: Plot) -> ChartLayout | None:
    """Return a chart's shapes on a plane of its size; None if no series has a point that can be drawn."""

    def is_drawable(point: Point) -> bool:
        on_axes = zip(point, (plot.x, plot.y), strict=True)
        return all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in on_axes)

    series = [replace(line, points=[*filter(is_drawable, line.points)]) for line in plot.series]
    front = [line for line in series if not line.background]
    xs, ys = ([point[axis] for line in front for point in line.points] for axis in (0, 1))
    if not xs:
        return None
    top = math.inf
    if plot.y.clips:  # a few spikes, far above 90 % of the values, must not flatten the rest
        high = sorted(ys)[int(0.9 * (len(ys) - 1))]
        top = high + 4 * max(high - min(ys), abs(high) * MIN_ROOM)
    reached = [end for line in front for ends in line.band for end in ends]
    kept = [y for y in ys if y <= top]
    levels = [line.level for line in front if line.level is not None]
    if plot.y.clips:  # a level that would take more than half of the chart is marked at its edge
        room = max(max(kept) - min(kept), MIN_ROOM * abs(max(kept)))
        levels = [level for level in levels if min(kept) - room <= level <= max(kept) + room]
    frame = _PlotFrame(plot, plot.x.limits(xs), plot.y.limits([*kept, *reached, *levels]))
    lines = [shape for line in sorted(series, key=lambda line: not line.background) for shape in frame.draw(line)]
    shapes = [*frame.decorations(), *lines, *frame.outliers(front)]
    # clipped shapes form one group, below markers and texts
    order = {"dot": 2} | dict.fromkeys(TEXTS, 3)
    shapes = [shape for shape in shapes if shape.text or shape.kind not in TEXTS]
    shapes.sort(key=lambda shape: order.get(shape.kind, int(shape.clipped)))
    return ChartLayout((frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top), shapes)


class _PlotFrame:
    """Geometry of a chart: the box in which series are drawn, and the ticks and texts around it."""

    def __init__(self, plot: Plot, x_limits: Point, y_limits: Point) -> None:
        self.plot, self.x_limits, self.y_limits = plot, x_limits, y_limits
        width, height = plot.size
        titles = textwrap.wrap(plot.title, int((width - 2 * EDGE) / TITLE_LETTER_WIDTH), max_lines=2, placeholder=" …")
        self.texts = [Shape("title", [(EDGE, 22 + LINE_HEIGHT * row)], BARE, line) for row, line in enumerate(titles)]
        self.top = 22 + LINE_HEIGHT * (len(titles) - 1)
        self._add_legend([line for line in plot.series if line.name])
        self.top += 20 if plot.y.clips else 14  # with space for outliers
        self.rows = plot.y.ticks or plot.y.round_ticks(y_limits, max(2, int((height - self.top - 40) // 32)))
        label_width = LETTER_WIDTH * max(map(len, self.rows.values()), default=0) + 6
        self.above = plot.y.ticks is not None and label_width > MAX_LABEL_SHARE * width  # names of rows are above them
        label_width = 0.0 if self.above else label_width
        self.left = EDGE + label_width + (LINE_HEIGHT + LETTER_WIDTH if plot.y.label else 0)
        self.right = width - EDGE - 6
        choices = (plot.x.round_ticks(x_limits, max_ticks) for max_ticks in range(7, 0, -1))
        box_width = self.right - self.left
        self.columns = plot.x.ticks or next((t for t in choices if _labels_width(t.values()) <= box_width), {})
        self.tilted = _labels_width(self.columns.values()) > box_width
        longest = max(map(len, self.columns.values()), default=0)
        label_height = 0.65 * (LETTER_WIDTH + 1) * longest + 15 if self.tilted else LINE_HEIGHT
        self.bottom = height - 9 - label_height - (LINE_HEIGHT if plot.x.label else 0)

    def _add_legend(self, named: Sequence[Series]) -> None:
        """Add the names of several series below the title, in as many lines as needed."""
        if len(named) < 2:
            return
        x, self.top = EDGE, self.top + LINE_HEIGHT + 2
        for series in named:
            name, y = self._shorten(series.name), self.top
            if x > EDGE and x + 25 + LETTER_WIDTH * len(name) > self.plot.size[0] - EDGE:
                x, y = EDGE, y + LINE_HEIGHT
            self.texts += [Shape("line", [(x, y - 4), (x + 20, y - 4)], series.look)] if series.look.width else []
            self.texts += [Shape("dot", [(x + 10, y - 4)], series.look)] if series.look.marker else []
            self.texts.append(Shape("name", [(x + 25, y)], BARE, name))
            x, self.top = x + 25 + LETTER_WIDTH * len(name) + 14, y

    def _shorten(self, name: str) -> str:
        max_letters = int((self.plot.size[0] - 2 * EDGE - 25) / LETTER_WIDTH)
        return name if len(name) <= max_letters else f"{name[: max_letters - 1]}…"

    def decorations(self) -> Iterator[Shape]:
        """Yield the title, legend, grid, axes, ticks and marks."""
        plot, left, right, top, bottom = self.plot, self.left, self.right, self.top, self.bottom
        yield from self.texts
        for tick, name in self.rows.items():
            y = self.y_of(tick)
            if plot.y.ticks:
                at = (left, y - 9) if self.above else (EDGE, y + 4)
                yield Shape("name", [at], BARE, self._shorten(name))
            else:
                yield Shape("grid", [(left, y), (right, y)])
                yield Shape("tick", [(left - 6, y + 4)], BARE, name, anchor="end")
        for tick, name in self.columns.items():
            x = self.x_of(tick)
            tick_line = [(x, top), (x, bottom)] if plot.y.ticks else [(x, bottom), (x, bottom + 4)]
            yield Shape("grid" if plot.y.ticks else "axis", tick_line)
            if self.tilted:
                yield Shape("tick", [(x + 4, bottom + 14)], BARE, name, anchor="end", angle=-40)
            else:
                yield Shape("tick", [(x, bottom + 18)], BARE, name, anchor="middle")
        yield Shape("axis", [(left, bottom), (right, bottom)])
        yield Shape("tick", [(right, plot.size[1] - 9)], BARE, plot.x.label, anchor="end")
        yield Shape("tick", [(EDGE + 8, (top + bottom) / 2)], BARE, plot.y.label, anchor="middle", angle=-90)
        for value, text in plot.marks:
            x = self.x_of(min(max(value, self.x_limits[0]), self.x_limits[1]))
            yield Shape("mark", [(x, top), (x, bottom)], text=text)

    def x_of(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * _fraction(value, self.x_limits, self.plot.x.log), 1)

    def y_of(self, value: float) -> float:
        return round(self.bottom + (self.top - self.bottom) * _fraction(value, self.y_limits, self.plot.y.log), 1)

    def draw(self, series: Series) -> Iterator[Shape]:
        """Yield the shapes of a series."""
        look, points = series.look, [(self.x_of(x), self.y_of(y)) for x, y in series.points]
        if series.level is not None:
            y = self.y_of(series.level)
            yield Shape("line", [(self.left, y), (self.right, y)], look, clipped=True)
        if series.band:
            ends = [(x, *map(self.y_of, band)) for (x, _), band in zip(points, series.band, strict=True)]
            outline = [*((x, low) for x, low, _ in ends), *((x, high) for x, _, high in reversed(ends))]
            yield Shape("band", outline, look, clipped=True)
        if series.bars:
            half = round(0.35 * (self.right - self.left) / len(points), 1)
            for x, y in points:
                left, right = x - half, x + half
                corners = [(left, self.bottom), (left, y), (right, y), (right, self.bottom)]
                yield Shape("bar", corners, look, clipped=True)
        elif look.width and len(points) > 1:
            yield Shape("faint" if series.background else "line", _average(points), look, clipped=True)
        for value, point in zip(series.points, points, strict=True) if look.marker else ():
            if self.top <= point[1] <= self.bottom:
                yield Shape("dot", [point], look, self._tooltip(value))
        for (x, y), label in zip(points, series.labels, strict=False):
            half = LETTER_WIDTH * len(label) / 2
            late, early = x + half > self.right, x - half < self.left
            x = self.right if late else self.left if early else x
            yield Shape("tick", [(x, y - 8)], look, label, anchor="end" if late else "start" if early else "middle")

    def _tooltip(self, value: Point) -> str:
        return f"{self.plot.x.label_of(value[0])}: {general(value[1], 4)}"

    def outliers(self, front: Sequence[Series]) -> Iterator[Shape]:
        """Yield an arrow at the edge, with its value, for each level outside and point above.

        Of neighbouring points only the highest has one.
        """
        arrows, look = list[float](), Look("c1", "^")
        for series in front if self.plot.y.clips else ():
            if series.level is None or self.y_limits[0] <= series.level <= self.y_limits[1]:
                continue
            is_above = series.level > self.y_limits[1]
            arrow = series.look._replace(marker="^" if is_above else "v")
            y = self.top - 5 if is_above else self.bottom - 6
            arrows += [self.right] if is_above else []
            yield Shape("dot", [(self.right - 4, y)], arrow, series.name)
            yield Shape("tick", [(self.right - 12, y + 4)], arrow, general(series.level, 4), anchor="end")
        above = [point for series in front for point in series.points if point[1] > self.y_limits[1]]
        for point in sorted(above, key=lambda point: -point[1]):
            x = self.x_of(point[0])
            late = x > self.right - OUTLIER_WIDTH
            if any(abs(x - a) < (2 if max(x, a) > self.right - OUTLIER_WIDTH else 1) * OUTLIER_WIDTH for a in arrows):
                continue
            arrows.append(x)
            yield Shape("dot", [(x, self.top - 5)], look, self._tooltip(point))
            beside = [(x - 7 if late else x + 7, self.top - 1)]
            yield Shape("tick", beside, look, general(point[1], 3), anchor="end" if late else "start")


def _fraction(value: float, limits: Point, log: bool) -> float:
    """Return a value's position along its axis: 0 at the beginning, 1 at the end."""
    low, high = limits
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def _labels_width(labels: Collection[str]) -> float:
    return len(labels) * ((LETTER_WIDTH + 1) * max(map(len, labels), default=0) + 6)


def _average(points: list[Point]) -> list[Point]:
    """Return at most MAX_LINE_POINTS points, each the mean of neighbours."""
    size = -(-len(points) // MAX_LINE_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], round(sum(y for _, y in group) / len(group), 1)) for group in groups]


def plot_svg(plot: Plot) -> Markup:
    """Return a chart as an <svg> element; empty if there is nothing to draw."""
    layout = lay_out(plot)
    if layout is None:
        return Markup("")
    groups = [(clipped, list(shapes)) for clipped, shapes in groupby(layout.shapes, key=lambda shape: shape.clipped)]
    helpers: dict[str, Any] = {"areas": AREAS, "texts": TEXTS, "g": "{:g}".format}
    helpers["coordinates"] = lambda points: " ".join(f"{x:g},{y:g}" for x, y in points)
    return Markup(template("chart_svg.html").render(plot=plot, box=layout.box, groups=groups, **helpers))


def html_plot(plot: Plot) -> Markup:
    """Return a chart that web/chart.js replaces by an interactive one; empty if there is nothing to draw."""
    fallback = plot_svg(plot)
    return mount_point("chart.js", plot_data(plot), fallback) if fallback else fallback


def html_plots(plots: Sequence[Plot], kind: str = "") -> Markup:
    """Return charts side by side, or stacked on a narrow page."""
    return html_charts([html_plot(plot) for plot in plots], kind)


def plot_data(plot: Plot) -> dict[str, Any]:
    """Return a chart as the JSON data of web/chart.js (`PlotData` in types.d.ts); long series are thinned."""
    return {
        "title": plot.title,
        "size": dict(zip(("width", "height"), plot.size, strict=True)),
        "x": _axis_data(plot.x),
        "y": _axis_data(plot.y),
        "series": list(map(_series_data, plot.series)),
        "marks": [{"x": x, "text": text} for x, text in plot.marks],
    }


def _axis_data(axis: Axis) -> dict[str, Any]:
    ticks = axis.ticks and [{"value": value, "label": label} for value, label in axis.ticks.items()]
    optional = {"log": axis.log, "ticks": ticks, "clips": axis.clips, "label": axis.label, "includes": [*axis.includes]}
    return {"format": axis.format, "pad": axis.pad, **{key: value for key, value in optional.items() if value}}


def _series_data(series: Series) -> dict[str, Any]:
    finite = [n for n, (x, _) in enumerate(series.points) if math.isfinite(x)]
    kept = [finite[index] for index in thin([series.points[n][1] for n in finite], MAX_DATA_POINTS)]
    optional: dict[str, Any] = {
        "name": series.name,
        "x": [_rounded(series.points[n][0]) for n in kept],
        "y": [_rounded(series.points[n][1]) for n in kept],
        "labels": [(series.labels[n] if n < len(series.labels) else "") for n in kept] if series.labels else None,
        "background": series.background,
        "bars": series.bars,
    }
    if series.band:
        low, high = ([_rounded(series.band[n][end]) for n in kept] for end in (0, 1))
        optional["band"] = {"low": low, "high": high}
    level = {} if series.level is None else {"level": _rounded(series.level)}
    return {"look": series.look._asdict(), **level, **{key: value for key, value in optional.items() if value}}


def _rounded(value: float) -> float | None:
    """Round to the digits that can be told apart on a screen; None if not finite, since JSON has no NaN."""
    return value if isinstance(value, int) else float(f"{value:.8g}") if math.isfinite(value) else None
