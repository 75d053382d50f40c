"""The usual picture of a model: boxes and arrows from the tokens below to the output above, sizes at the side.

It is laid out here as shapes, which matplotlib draws for print and web/anatomy.js on a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from weft.costs.units import short
from weft.explain.anatomy.parts import Part
from weft.figures.picture import new_figure

WIDE, HIGH, GAP, SUM = 3.3, 0.62, 0.34, 0.11  # of a box, between boxes, of a sum's circle
Pair = tuple[float, float]
COLUMN = 6.3  # from one stack to the next
LEFT, FOOT = -2.9, -0.55  # where the plane begins
INCHES = 0.72  # of a unit
INK, SOFT = "#000000", "#808080"
LINE: dict[str, Any] = {"color": INK, "linewidth": 1.0}
ARROW = {"arrowstyle": "->", **LINE, "shrinkA": 0, "shrinkB": 0}
LOOP = {**ARROW, "connectionstyle": "arc3,rad=1.4"}
ANCHORS = {"start": "left", "middle": "center", "end": "right"}
# a light shade for each kind of part, by what its name holds; the names tell them apart as well
FILLS = {
    "norm": "#f3ecd2",
    "attention": "#cfe3f2",
    "embedding": "#e4e4ea",
    "positions": "#e4e4ea",
    "logits": "#f6d9cc",
    "sentence": "#f6d9cc",
    "": "#d9ead6",
}


class Shape(NamedTuple):
    """A box, frame, line, arrow, loop, sum or text; of a box and a frame the places are a corner and the opposite one.

    The `look` of a box is a key of FILLS. A text's start, middle or end stands at its place, `size` points high. `part`
    numbers the part that a box stands for: its column, its place there, its place inside of that …
    """

    kind: str
    places: tuple[Pair, ...]
    text: str = ""
    size: float = 8.5
    anchor: str = "middle"
    look: str = ""
    part: tuple[int, ...] = ()


class Diagram(NamedTuple):
    """Shapes on a plane of this size, whose y grows upwards."""

    width: float
    height: float
    shapes: list[Shape]


@dataclass
class _Column:
    """A stack that is being drawn: where it stands, and how far up it is."""

    x: float
    side: int  # skips run at the left (−1), or at the right
    y: float = -0.1
    shapes: list[Shape] = field(default_factory=list)
    sources: list[Pair] = field(default_factory=list)  # what reads the source

    def add(self, kind: str, *places: Pair, **more: Any) -> None:
        self.shapes.append(Shape(kind, places, **more))


def diagram(columns: Sequence[Part], first: int = 0) -> Diagram:
    """Stacks side by side, as high as the highest; the `first` of them is that column of its model."""
    drawn = []
    for number, column in enumerate(columns):
        stack = _Column(number * COLUMN, 1 if number or _reads(column) else -1)
        what = "source tokens" if column.parts[0].name.startswith("source") else "tokens"
        stack.add("text", (stack.x, -0.28), text=what, size=9.0)
        for place, part in enumerate(column.parts):
            _draw(stack, part, (first + number, place))
        stack.add("arrow", (stack.x, stack.y), (stack.x, stack.y + GAP))
        drawn.append(stack)
    last = drawn[-1]
    for edge, y in last.sources:
        if len(drawn) > 1:  # from the top of the first stack to what reads it in the second
            between, top = drawn[1].x - WIDE / 2 - 1.25, drawn[0].y + GAP
            last.add("line", (drawn[0].x, top), (between, top), (between, y))
            last.add("arrow", (between, y), (edge, y))
        else:  # drawn without its encoder
            last.add("arrow", (edge - 0.9, y), (edge, y))
            last.add("text", (edge - 0.6, y + 0.18), text="source", anchor="end")
    high = max(stack.y for stack in drawn) + GAP - FOOT + 0.1
    shapes = [_moved(shape) for stack in drawn for shape in stack.shapes]
    return Diagram(COLUMN * len(columns) + 0.2, round(high, 3), shapes)


def _moved(shape: Shape) -> Shape:
    """The same on a plane that begins at zero."""
    return shape._replace(places=tuple((round(x - LEFT, 3), round(y - FOOT, 3)) for x, y in shape.places))


def _reads(part: Part) -> bool:
    return part.reads or any(map(_reads, part.parts))


def _draw(column: _Column, part: Part, number: tuple[int, ...]) -> None:
    """Draw a part on top of what is there; a sum is fed from below the parts of the block that it skips."""
    if part.skips or part.box:
        column.add("arrow", (column.x, column.y), (column.x, column.y + GAP))
        column.y += GAP
    if part.box:
        _box(column, part, number)
    elif part.parts:
        start, framed = column.y, part.repeats > 1
        _rise(column, framed)
        below = [column.y]
        for place, inside in enumerate(part.parts):
            _draw(column, inside, (*number, place))
            if inside.skips:
                _sum(column, below[place - inside.skips] + 0.45 * GAP)
            below.append(column.y)
        _rise(column, framed)
        if framed:
            _frame(column, part, start)


def _rise(column: _Column, framed: bool) -> None:
    if framed:
        column.add("line", (column.x, column.y), (column.x, column.y + GAP))
        column.y += GAP


def _box(column: _Column, part: Part, number: tuple[int, ...]) -> None:
    x, y = column.x, column.y
    look = next(kind for kind in FILLS if kind in part.box.lower())
    edge, middle = x - WIDE / 2, y + HIGH / 2
    column.add("box", (edge, y), (edge + WIDE, y + HIGH), look=look, part=number)
    times = f" × {part.repeats}" if part.repeats > 1 else ""
    column.add("text", (x, middle + 0.13 * bool(part.detail)), text=f"{part.box}{times}", size=9.5, look="inside")
    if part.detail:
        column.add("text", (x, middle - 0.15), text=part.detail, size=7.8, look="inside")
    if part.parameters:
        count = short(part.repeats * part.parameters)
        column.add("text", (x + WIDE / 2 + 0.64, middle), text=count, size=7.8, anchor="start", look="soft")
    if part.loops:
        column.add("loop", (edge, y + HIGH - 0.14), (edge, y + 0.14))
        column.add("text", (edge - 0.42, middle), text="h", anchor="end")
    if part.reads:
        column.sources.append((edge, middle))
    column.y += HIGH


def _sum(column: _Column, start: float) -> None:
    x, y = column.x, column.y + SUM
    out = x + column.side * (WIDE / 2 + 0.34)
    column.add("line", (x, start), (out, start), (out, y))
    column.add("arrow", (out, y), (x + column.side * SUM, y))
    column.add("sum", (x, y))
    column.y += 2 * SUM


def _frame(column: _Column, part: Part, start: float) -> None:
    left, right, pad = column.x - WIDE / 2, column.x + WIDE / 2, 0.52
    column.add("frame", (left - pad, start + 0.1), (right + pad, column.y - 0.1))
    middle = (start + column.y) / 2
    column.add("text", (left - pad - 0.1, middle), text=f"{part.repeats} ×", size=11.0, anchor="end")


def figure(drawing: Diagram) -> Figure:
    """The diagram for print."""
    fig = new_figure(INCHES * drawing.width, INCHES * drawing.height)
    axes: Any = fig.add_subplot()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(0, drawing.height)
    axes.set_aspect("equal")
    axes.axis("off")
    for shape in drawing.shapes:
        start, end = shape.places[0], shape.places[-1]
        match shape.kind:
            case "text":
                colour = {"inside": "#111111", "soft": SOFT}.get(shape.look, INK)
                where = {"ha": ANCHORS[shape.anchor], "va": "center", "color": colour}
                axes.text(*start, shape.text, fontsize=shape.size, parse_math=False, **where)
            case "box" | "frame":
                radius, fill, edge = (0.09, FILLS[shape.look], "#44606f") if shape.part else (0.16, "none", SOFT)
                size, rounded = (end[0] - start[0], end[1] - start[1]), f"round,pad=0,rounding_size={radius}"
                axes.add_patch(FancyBboxPatch(start, *size, boxstyle=rounded, facecolor=fill, edgecolor=edge))
            case "arrow" | "loop":
                axes.annotate("", end, start, arrowprops=ARROW if shape.kind == "arrow" else LOOP)
            case "sum":
                ring = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.0}
                axes.plot(*start, marker="o", markersize=10, **ring)
                axes.plot(*start, marker="+", markersize=8, **ring)
            case "line":
                axes.plot(*zip(*shape.places, strict=True), **LINE)
    return fig
