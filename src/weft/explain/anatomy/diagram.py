"""Diagram of a model: boxes and arrows from the tokens at the bottom to the output at the top, sizes at the side.

It is laid out here as shapes, which matplotlib draws for print and web/anatomy.js on a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from weft.costs.units import short
from weft.explain.anatomy.parts import ModelPart
from weft.figures.picture import new_figure

Point = tuple[float, float]
WIDTH, HEIGHT, GAP, SUM_RADIUS = 3.8, 0.62, 0.34, 0.11  # of a box, between boxes, of a sum's circle
PAD, ASIDE = 0.52, 0.12  # between a box and the frame around it, between the frame and the numbers of parameters
COLUMN = 6.8  # distance of two stacks
LEFT, BOTTOM = -3.15, -0.55  # origin of the plane
INCHES = 0.72  # per unit
MAX_UNROLLED_LAYERS = 3  # of a recurrent network that is drawn over time
INK, SOFT = "#000000", "#808080"
LINE: dict[str, Any] = {"color": INK, "linewidth": 1.0}
ARROW = {"arrowstyle": "->", **LINE, "shrinkA": 0, "shrinkB": 0}
LOOP = {**ARROW, "connectionstyle": "arc3,rad=1.4"}
ANCHORS = {"start": "left", "middle": "center", "end": "right"}
# a light shade for each kind of part, by a word in its name
FILLS = {"norm": "#f3ecd2", "attention": "#cfe3f2", **dict.fromkeys(("embedding", "positions"), "#e4e4ea")}
FILLS |= {**dict.fromkeys(("logits", "sentence"), "#f6d9cc"), "": "#d9ead6"}


class DiagramPoint(NamedTuple):
    """Point of a diagram, in units of its plane."""

    x: float
    y: float


class DiagramShape(NamedTuple):
    """Box, frame, line, arrow, loop, sum or text."""

    kind: str
    points: tuple[Point, ...]  # of a box and a frame, two opposite corners
    text: str = ""
    size: float = 9.0  # points of a text
    anchor: str = "middle"  # of a text: start, middle or end
    look: str = ""  # of a box, a key of FILLS
    part: tuple[int, ...] = ()  # of a box: its column, its index there, its index inside that …


class Diagram(NamedTuple):
    """Shapes on a plane of this size; y grows upwards."""

    width: float
    height: float
    shapes: list[DiagramShape]


@dataclass
class _Column:
    """Stack being drawn, up to height y."""

    x: float
    side: int  # skips run at the left (−1) or at the right (1)
    y: float = -0.1
    shapes: list[DiagramShape] = field(default_factory=list)
    source_readers: list[Point] = field(default_factory=list)

    def add(self, kind: str, *points: Point, look: str = "", part: tuple[int, ...] = ()) -> None:
        self.shapes.append(DiagramShape(kind, points, look=look, part=part))

    def write(self, at: Point, text: str, *, size: float = 9.0, anchor: str = "middle", look: str = "") -> None:
        self.shapes.append(DiagramShape("text", (at,), text, size=size, anchor=anchor, look=look))

    def rise(self, kind: str) -> None:
        """Draw a line or an arrow up to the next part."""
        self.add(kind, (self.x, self.y), (self.x, self.y + GAP))
        self.y += GAP


def diagram(columns: Sequence[ModelPart], first: int = 0) -> Diagram:
    """Draw stacks side by side; the first of them is column number `first` of its model."""
    drawn = []
    for number, column in enumerate(columns):
        stack = _Column(number * COLUMN, 1 if number or _reads_source(column) else -1)
        tokens = "source tokens" if column.parts[0].name.startswith("source") else "tokens"
        stack.write((stack.x, -0.28), tokens, size=9.0)
        for index, part in enumerate(column.parts):
            _draw(stack, part, (first + number, index))
        counted = next((shape for shape in stack.shapes if shape.look == "soft"), None)
        if counted:  # the lowest number of parameters says what it is
            x, y = counted.points[0]
            stack.write((x, y - 0.26), "parameters", anchor="start", look="soft")
        stack.add("arrow", (stack.x, stack.y), (stack.x, stack.y + GAP))
        drawn.append(stack)
    last = drawn[-1]
    for edge, y in last.source_readers:
        if len(drawn) > 1:  # from the top of the encoder to its readers in the decoder
            between, top = drawn[1].x - WIDTH / 2 - 1.25, drawn[0].y + GAP
            last.add("line", (drawn[0].x, top), (between, top), (between, y))
            last.add("arrow", (between, y), (edge, y))
        else:  # drawn without its encoder
            last.add("arrow", (edge - 0.9, y), (edge, y))
            last.write((edge - 0.6, y + 0.18), "source", anchor="end")
    height = max(stack.y for stack in drawn) + GAP - BOTTOM + 0.1
    return Diagram(COLUMN * len(columns) + 0.2, round(height, 3), _moved(drawn, -LEFT))


def _moved(stacks: Sequence[_Column], right: float) -> list[DiagramShape]:
    """Return the shapes of stacks on a plane that begins at BOTTOM, moved to the right."""

    def moved(x: float, y: float) -> DiagramPoint:
        return DiagramPoint(round(x + right, 3), round(y - BOTTOM, 3))

    shapes = (shape for stack in stacks for shape in stack.shapes)
    return [shape._replace(points=tuple(moved(*point) for point in shape.points)) for shape in shapes]


def unrolled(column: ModelPart) -> Diagram:
    """Draw a recurrent language model over time, with the names of the lectures: x_t, h_t, y_t and the loss ℓ_t.

    `column` has an embedding, recurrent layers and logits. The last step is T.
    """
    layers = [(number, part) for number, part in enumerate(column.parts) if part.loops]
    shown = [(number, copy) for number, part in layers for copy in range(part.repeats)][:MAX_UNROLLED_LAYERS]
    pitch, width = 2.3, 1.35
    stack = _Column(0.0, -1)
    for step, t in enumerate(("₁", "₂", "₃", "_T")):
        x = step * pitch + 0.5 * (t == "_T")
        stack.x, stack.y = x, -0.1
        stack.write((x, -0.28), f"x{t}", size=10.0)
        for level, (number, _) in enumerate(shown):
            stack.rise("arrow")
            middle, mark = stack.y + HEIGHT / 2, "" if len(shown) == 1 else f"⁽{'⁰¹²³'[level]}⁾"
            stack.add("box", (x - width / 2, stack.y), (x + width / 2, stack.y + HEIGHT), part=(0, number))
            stack.write((x, middle), f"h{t}{mark}", size=10.0, look="inside")
            before = x - pitch + width / 2 if t not in ("₁", "_T") else x - width / 2 - 0.62
            stack.add("arrow", (before, middle), (x - width / 2, middle))
            stack.write((before - 0.08, middle), {"₁": f"h₀{mark} = 0", "_T": "…"}.get(t, ""), anchor="end")
            if t == "₃":
                stack.add("arrow", (x + width / 2, middle), (x + width / 2 + 0.4, middle))
            stack.y += HEIGHT
        stack.rise("arrow")
        for text, look in ((f"y{t}", "logits"), (f"ℓ{t}", "norm")):
            corners = (x - width / 2, stack.y), (x + width / 2, stack.y + HEIGHT)
            stack.add("box", *corners, look=look, part=(0, len(column.parts) - 1))
            stack.write((x, stack.y + HEIGHT / 2), text, size=10.0, look="inside")
            stack.y += HEIGHT
            if look == "logits":
                stack.rise("arrow")
    caption = "y_t = softmax(W_yh h_t + b_y), ℓ_t = −log of y_t at the next word, ℓ = Σ ℓ_t"
    stack.write((1.6 * pitch, stack.y + 0.4), caption, size=9.0, look="soft")
    left = 2.1
    return Diagram(round(left + 3 * pitch + 0.5 + width, 3), round(stack.y + 0.8 - BOTTOM, 3), _moved([stack], left))


def beside(left: Diagram, right: Diagram) -> Diagram:
    """Draw two diagrams side by side."""
    moved = [s._replace(points=tuple(DiagramPoint(x + left.width, y) for x, y in s.points)) for s in right.shapes]
    return Diagram(left.width + right.width, max(left.height, right.height), [*left.shapes, *moved])


def _reads_source(part: ModelPart) -> bool:
    return part.reads or any(map(_reads_source, part.parts))


def _draw(column: _Column, part: ModelPart, number: tuple[int, ...]) -> None:
    """Draw a part on top of the column; a sum is fed from below the parts that it skips."""
    if part.skips or part.title:
        column.rise("arrow")
    if part.title:
        _draw_box(column, part, number)
    elif part.parts:
        start, framed = column.y, part.repeats > 1
        if framed:
            column.rise("line")
        below = [column.y]
        for index, inside in enumerate(part.parts):
            _draw(column, inside, (*number, index))
            if inside.skips:
                x, y, fed = column.x, column.y + SUM_RADIUS, below[index - inside.skips] + 0.45 * GAP
                out = x + column.side * (WIDTH / 2 + 0.34)
                column.add("line", (x, fed), (out, fed), (out, y))
                column.add("arrow", (out, y), (x + column.side * SUM_RADIUS, y))
                column.add("sum", (x, y))
                column.y += 2 * SUM_RADIUS
            below.append(column.y)
        if framed:
            column.rise("line")
            left, right = column.x - WIDTH / 2 - PAD, column.x + WIDTH / 2 + PAD
            column.add("frame", (left, start + 0.1), (right, column.y - 0.1))
            column.write((left - 0.1, (start + column.y) / 2), f"{part.repeats} ×", size=11.0, anchor="end")


def _draw_box(column: _Column, part: ModelPart, number: tuple[int, ...]) -> None:
    x, y, edge, middle = column.x, column.y, column.x - WIDTH / 2, column.y + HEIGHT / 2
    look = next(kind for kind in FILLS if kind in part.title.lower())
    column.add("box", (edge, y), (edge + WIDTH, y + HEIGHT), look=look, part=number)
    title = part.title + (f" × {part.repeats}" if part.repeats > 1 else "")
    column.write((x, middle + 0.13 * bool(part.detail)), title, size=10.0, look="inside")
    if part.detail:
        column.write((x, middle - 0.15), part.detail, size=9.0, look="inside")
    if part.parameters:
        count = short(part.repeats * part.parameters)
        column.write((x + WIDTH / 2 + PAD + ASIDE, middle), count, size=9.0, anchor="start", look="soft")
    if part.loops:
        column.add("loop", (edge, y + HEIGHT - 0.14), (edge, y + 0.14))
        column.write((edge - 0.42, middle), "h", anchor="end")
    if part.reads:
        column.source_readers.append((edge, middle))
    column.y += HEIGHT


def figure(drawing: Diagram) -> Figure:
    """Draw the diagram for print."""
    fig = new_figure(INCHES * drawing.width, INCHES * drawing.height)
    axes: Any = fig.add_subplot()
    axes.set(xlim=(0, drawing.width), ylim=(0, drawing.height), aspect="equal")
    axes.axis("off")
    for shape in drawing.shapes:
        start, end = shape.points[0], shape.points[-1]
        match shape.kind:
            case "text":
                colour = {"inside": "#111111", "soft": SOFT}.get(shape.look, INK)
                align = {"ha": ANCHORS[shape.anchor], "va": "center", "color": colour}
                axes.text(*start, shape.text, fontsize=shape.size, parse_math=False, **align)
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
                axes.plot(*zip(*shape.points, strict=True), **LINE)
    return fig
