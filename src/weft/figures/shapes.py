"""A chart laid out as shapes, and the shapes as SVG in the colours of the page, which suits light and dark.

A report is written at every evaluation, so nothing here loads matplotlib.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from weft.figures.page import html_charts
from weft.figures.plot import PLAIN, Axis, Look, Plot, Point, Series

MAX_POINTS = 500  # of a line; more are thinned
EDGE, GAP = 14.0, 17.0  # around everything; from one line of text to the next
LETTER, BOLD = 7.0, 9.2  # width of one, about; in a title
CIRCLES = {"o": 2.6, ".": 1.8, "ring": 5.5}  # radii
MARKERS = {  # from the middle
    "s": "m-3-3h6v6h-6z",
    "^": "m0-4 4 7h-8z",
    "D": "m0-4 4 4-4 4-4-4z",
    "v": "m0 4 4-7h-8z",
    ">": "m4 0-7 4v-8z",
    "<": "m-4 0 7 4v-8z",
    "*": "m0-6 1.4 4.2h4.4l-3.6 2.6 1.4 4.2-3.6-2.6-3.6 2.6 1.4-4.2-3.6-2.6h4.4z",
    "x": "m-3-3 6 6m0-6-6 6",
    "|": "m0-5v10",
    "_": "m-5 0h10",
}


class Line(NamedTuple):
    """A line through places. `kind` is its class on a page, `title` what shows when it is pointed at."""

    places: Sequence[Point]
    kind: str = "line"
    look: Look = PLAIN
    title: str = ""


class Area(NamedTuple):
    """A filled one: a band or a bar."""

    places: Sequence[Point]
    kind: str
    colour: str


class Mark(NamedTuple):
    """A marker at a place."""

    place: Point
    look: Look
    title: str = ""


class Text(NamedTuple):
    """A text whose start, middle or end stands at a place."""

    place: Point
    text: str
    kind: str = "tick"
    anchor: str = "start"
    colour: str = ""
    angle: float = 0.0


Shape = Line | Area | Mark | Text


def shapes(plot: Plot) -> list[Shape]:
    """What a chart is drawn with, on a plane of its size; nothing where no series has a point to draw."""
    series = [replace(each, points=[point for point in each.points if _has_place(plot, point)]) for each in plot.series]
    front = [each for each in series if not each.background]
    xs, ys = ([point[axis] for each in front for point in each.points] for axis in (0, 1))
    if not xs:
        return []
    top = _clipped_at(ys) if plot.y.clips else math.inf
    held = [end for each in front for ends in each.band for end in ends]
    held += [each.level for each in front if each.level is not None]
    frame = _Frame(plot, plot.x.limits(xs), plot.y.limits([*(y for y in ys if y <= top), *held]))
    drawn = [shape for each in sorted(series, key=lambda each: not each.background) for shape in frame.drawn(each)]
    outliers = [shape for each in front for shape in frame.outliers(each, top)]
    return sorted([*frame.around(), *drawn, *outliers], key=lambda shape: isinstance(shape, Text))  # texts are on top


def _has_place(plot: Plot, point: Point) -> bool:
    on_axes = zip(point, (plot.x, plot.y), strict=True)
    return all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in on_axes)


class _Frame:
    """Where everything stands in a chart: the box that series are drawn in, and what is around it."""

    def __init__(self, plot: Plot, x_limits: Point, y_limits: Point) -> None:
        self.plot, self.x_limits, self.y_limits = plot, x_limits, y_limits
        width, height = plot.size
        titles = textwrap.wrap(plot.title, int((width - 2 * EDGE) / BOLD), max_lines=2, placeholder=" …")
        self.texts: list[Shape] = [Text((EDGE, 22 + GAP * number), line, "title") for number, line in enumerate(titles)]
        self.top = 22 + GAP * (len(titles) - 1)
        self._add_names([each for each in plot.series if each.name])
        self.top += 14
        self.rows = plot.y.ticks or plot.y.round_numbers(y_limits, max(2, int((height - self.top - 40) // 32)))
        self.rows_inside = plot.y.ticks is not None  # names stand above what they name
        beside = 0.0 if self.rows_inside else LETTER * max(map(len, self.rows.values()), default=0) + 6
        self.left, self.right = EDGE + beside + (GAP if plot.y.label else 0), width - EDGE - 6
        self.columns = plot.x.ticks or _fitting_ticks(plot.x, x_limits, self.right - self.left)
        self.tilted = _width_of(self.columns.values()) > self.right - self.left
        under = 0.66 * LETTER * max(map(len, self.columns.values()), default=0) + 12 if self.tilted else GAP
        self.foot = height - 9 - under - (GAP if plot.x.label else 0)

    def _add_names(self, named: Sequence[Series]) -> None:
        """Those of several series, one after another under the title, in as many lines as they need."""
        if len(named) < 2:
            return
        x, self.top = EDGE, self.top + GAP + 2
        for each in named:
            name, look = self._fitting(each.name), each.look
            if x > EDGE and x + 25 + LETTER * len(name) > self.plot.size[0] - EDGE:
                x, self.top = EDGE, self.top + GAP
            self.texts += [Line([(x, self.top - 4), (x + 20, self.top - 4)], look=look)] if look.width else []
            self.texts += [Mark((x + 10, self.top - 4), look)] if look.marker else []
            self.texts.append(Text((x + 25, self.top), name, "name"))
            x += 25 + LETTER * len(name) + 14

    def _fitting(self, name: str) -> str:
        """As much of a name as has space beside its sign."""
        most = int((self.plot.size[0] - 2 * EDGE - 25) / LETTER)
        return name if len(name) <= most else f"{name[: most - 1]}…"

    def around(self) -> Iterator[Shape]:
        """Title, names and axes, and lines where something happened."""
        plot, left, right, top, foot = self.plot, self.left, self.right, self.top, self.foot
        yield from self.texts
        for tick, name in self.rows.items():
            y = self.y_of(tick)
            if self.rows_inside:
                yield Text((left, y - 9), self._fitting(name), "name")
            else:
                yield Line([(left, y), (right, y)], "grid")
                yield Text((left - 6, y + 4), name, anchor="end")
        for tick, name in self.columns.items():
            x = self.x_of(tick)
            yield Line([(x, top), (x, foot)], "grid") if self.rows_inside else Line([(x, foot), (x, foot + 4)], "axis")
            tilted = Text((x + 4, foot + 14), name, anchor="end", angle=-40)
            yield tilted if self.tilted else Text((x, foot + 18), name, anchor="middle")
        yield Line([(left, foot), (right, foot)], "axis")
        yield Text((right, plot.size[1] - 9), plot.x.label, anchor="end")
        if plot.y.label:
            yield Text((EDGE + 8, (top + foot) / 2), plot.y.label, anchor="middle", angle=-90)
        for value, text in plot.marks:
            x = self.x_of(min(max(value, self.x_limits[0]), self.x_limits[1]))
            yield Line([(x, top), (x, foot)], "mark", title=text)

    def x_of(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * _share(value, self.x_limits, self.plot.x.log), 1)

    def y_of(self, value: float) -> float:
        return round(self.foot + (self.top - self.foot) * _share(value, self.y_limits, self.plot.y.log), 1)

    def drawn(self, series: Series) -> Iterator[Shape]:
        """The shapes of a series, as far as they lie in the box."""
        look, places = series.look, [(self.x_of(x), self.y_of(y)) for x, y in series.points]
        if series.level is not None:
            y = self.y_of(series.level)
            yield Line([(self.left, y), (self.right, y)], "line", look)
        if series.band:
            around = [
                (x, self.y_of(low), self.y_of(high)) for (x, _), (low, high) in zip(places, series.band, strict=True)
            ]
            lows, highs = [(x, low) for x, low, _ in around], [(x, high) for x, _, high in around]
            yield Area([*lows, *reversed(highs)], "band", look.colour)
        if series.bars:
            half = round(0.35 * (self.right - self.left) / len(places), 1)
            for x, y in places:
                left, right = x - half, x + half
                yield Area([(left, self.foot), (left, y), (right, y), (right, self.foot)], "bar", look.colour)
        elif look.width:
            kind = "line faint" if series.background else "line"
            yield from (Line(part, kind, look) for part in _parts_inside(_thinned(places), self))
        for (x, y), place in zip(series.points, places, strict=True) if look.marker else ():
            if self.left <= place[0] <= self.right and self.top <= place[1] <= self.foot:
                yield Mark(place, look, f"{self.plot.x.named(x)}: {y:.4g}")
        for (x, y), label in zip(places, series.labels, strict=False):
            late = x + LETTER * len(label) / 2 > self.right
            yield Text((self.right if late else x, y - 8), label, "tick", "end" if late else "middle", look.colour)

    def outliers(self, series: Series, limit: float) -> Iterator[Shape]:
        """What lies above the chart as arrows at its edge, each with its value; of neighbours the highest."""
        said = -math.inf
        for above, group in groupby(series.points, key=lambda point: point[1] > limit):
            if not above:
                continue
            x, value = max(group, key=lambda point: point[1])
            at, late = self.x_of(x), self.x_of(x) > self.right - 44
            yield Mark((at, self.top - 5), Look("c1", "^"), f"{self.plot.x.named(x)}: {value:.4g}")
            if at - said > 44:
                beside = (at - 7 if late else at + 7, self.top - 1)
                yield Text(beside, f"{value:.3g}", "tick", "end" if late else "start", "c1")
                said = at


def _share(value: float, limits: Point, log: bool) -> float:
    """How far along its axis a value lies: 0 at the beginning, 1 at the end."""
    low, high = limits
    return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)


def _width_of(names: Iterable[str]) -> float:
    return sum(LETTER * len(name) + 8 for name in names)


def _fitting_ticks(axis: Axis, limits: Point, width: float) -> dict[float, str]:
    """As many ticks as have space beside each other."""
    several = (axis.round_numbers(limits, most) for most in range(7, 0, -1))
    return next((ticks for ticks in several if _width_of(ticks.values()) <= width), {})


def _clipped_at(ys: Sequence[float]) -> float:
    """A few spikes must not flatten the rest: the height above which values are far from nine tenths of them."""
    ordered = sorted(ys)
    high = ordered[int(0.9 * (len(ordered) - 1))]
    return high + 4 * max(high - ordered[0], abs(high) * 0.05)


def _thinned(places: list[Point]) -> list[Point]:
    """At most MAX_POINTS, each the mean of its neighbours."""
    size = -(-len(places) // MAX_POINTS)
    if size <= 1:
        return places
    groups = [places[at : at + size] for at in range(0, len(places), size)]
    return [(group[-1][0], round(sum(y for _, y in group) / len(group), 1)) for group in groups]


def _parts_inside(places: Sequence[Point], box: _Frame) -> Iterator[list[Point]]:
    """The parts of a line that lie in the box (Liang and Barsky 1984)."""
    part: list[Point] = []
    for (x, y), (next_x, next_y) in pairwise(places):
        first, last = 0.0, 1.0
        for start, end, low, high in ((x, next_x, box.left, box.right), (y, next_y, box.top, box.foot)):
            if start == end:
                first = first if low <= start <= high else math.inf
            else:
                near, far = sorted(((low - start) / (end - start), (high - start) / (end - start)))
                first, last = max(first, near), min(last, far)
        if first <= last:
            ends = [(round(x + t * (next_x - x), 1), round(y + t * (next_y - y), 1)) for t in (first, last)]
            part = [*part, ends[1]] if part and first == 0 else ends
        if part and (first > last or last < 1):
            yield part
            part = []
    if part:
        yield part


# ---- as SVG


def plot_svg(plot: Plot) -> Markup:
    """A chart as a part of a page; nothing where there is nothing to draw."""
    drawn = [_element(shape) for shape in shapes(plot)]
    head = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">\n'
    return Markup(head).format(*plot.size, plot.title) + Markup("\n".join([*drawn, "</svg>"])) if drawn else Markup("")


def html_plots(plots: Sequence[Plot], kind: str = "") -> Markup:
    """Charts side by side, or one below another on a narrow page."""
    return html_charts([plot_svg(plot) for plot in plots], kind)


def _element(shape: Shape) -> str:
    match shape:
        case Line(places, "line" | "line faint" as kind, look):
            dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
            line = f'<polyline points="{_points(places)}" stroke-width="{look.width}"{dash}'
            return f"{line} {_class(kind, look.colour)}/>"
        case Line([(x, y), (to_x, to_y)], kind, _, title):
            return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}"{_end("path", title)}'
        case Area(places, kind, colour):
            return f'<polygon points="{_points(places)}" {_class(kind, colour)}/>'
        case Mark((x, y), Look(colour, "o" | "." | "ring" as marker), title):
            kind = _class("ring" if marker == "ring" else "dot", colour)
            return f'<circle cx="{x:g}" cy="{y:g}" r="{CIRCLES[marker]}" {kind}{_end("circle", title)}'
        case Mark((x, y), look, title):
            return f'<path d="M{x:g} {y:g}{MARKERS[look.marker]}" {_class("dot", look.colour)}{_end("path", title)}'
        case Text((x, y), text, kind, anchor, colour, angle):
            turned = f' transform="rotate({angle:g} {x:g} {y:g})"' if angle else ""
            kinds = _class(kind if anchor == "start" else f"{kind} {anchor}", colour)
            return f'<text x="{x:g}" y="{y:g}"{turned} {kinds}>{escape(text)}</text>'
    raise AssertionError(f"no such shape: {shape}")


def _points(places: Sequence[Point]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _class(kind: str, colour: str) -> str:
    if colour.endswith("%"):
        return f'class="{kind}" style="color:color-mix(in srgb,var(--deep) {colour},var(--card))"'
    return f'class="{kind} {colour}"' if colour else f'class="{kind}"'


def _end(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"
