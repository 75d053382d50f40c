"""The usual picture of a model: boxes and arrows from the tokens below to the output above, sizes at the side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from weft.costs.units import short
from weft.explain.anatomy.parts import Part
from weft.figures.picture import new_figure

WIDE, HIGH, GAP, SUM = 3.3, 0.62, 0.34, 0.11  # of a box, between boxes, of a sum's circle
Pair = tuple[float, float]
COLUMN = 6.3  # from one stack to the next
INK, SOFT = "#000000", "#808080"  # black is the page's own ink
LINE: dict[str, Any] = {"color": INK, "linewidth": 1.0}
ARROW = {"arrowstyle": "->", **LINE, "shrinkA": 0, "shrinkB": 0}
MIDDLE = {"ha": "center", "va": "center"}
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


@dataclass
class _Column:
    """A stack that is being drawn: where it stands, and how far up it is."""

    axes: Any
    x: float
    side: int  # skips run at the left (−1), or at the right
    y: float = 0.0
    sources: list[tuple[float, float]] = field(default_factory=list)  # what reads the source


def diagram(columns: Sequence[Part]) -> Figure:
    """A figure of stacks side by side, as high as the highest."""
    heights = [_height(column) for column in columns]
    wide, high = COLUMN * len(columns) + 0.2, max(heights) + 0.9
    figure = new_figure(0.72 * wide, 0.72 * high)
    axes: Any = figure.add_subplot()
    axes.set_xlim(-2.9, -2.9 + wide)
    axes.set_ylim(-0.55, high - 0.55)
    axes.set_aspect("equal")
    axes.axis("off")
    drawn = []
    for number, column in enumerate(columns):
        stack = _Column(axes, number * COLUMN, 1 if number or _reads(column) else -1)
        what = "source tokens" if column.parts[0].name.startswith("source") else "tokens"
        axes.text(stack.x, -0.28, what, fontsize=9, **MIDDLE)
        stack.y = -0.1
        for part in column.parts:
            _draw(stack, part)
        _arrow(axes, (stack.x, stack.y), (stack.x, stack.y + GAP))
        drawn.append(stack)
    for edge, y in drawn[-1].sources:
        if len(drawn) > 1:  # from the top of the first stack to what reads it in the second
            between, top = drawn[1].x - WIDE / 2 - 1.25, drawn[0].y + GAP
            axes.plot([drawn[0].x, between, between], [top, top, y], **LINE)
            _arrow(axes, (between, y), (edge, y))
        else:  # drawn without its encoder
            _arrow(axes, (edge - 0.9, y), (edge, y))
            axes.text(edge - 0.6, y + 0.08, "source", ha="right", va="bottom", fontsize=8.5)
    return figure


def _reads(part: Part) -> bool:
    return part.reads or any(map(_reads, part.parts))


def _height(part: Part) -> float:
    if part.skips or part.box:
        return GAP + (2 * SUM if part.skips else HIGH)
    return sum(map(_height, part.parts)) + (2 * GAP if part.parts and part.repeats > 1 else 0.0)


def _draw(column: _Column, part: Part) -> None:
    """Draw a part on top of what is there; a sum is fed from below the parts of the block that it skips."""
    if part.skips or part.box:
        _arrow(column.axes, (column.x, column.y), (column.x, column.y + GAP))
        column.y += GAP
    if part.box:
        _box(column, part)
    elif part.parts:
        start, framed = column.y, part.repeats > 1
        _rise(column, framed)
        below = [column.y]
        for number, inside in enumerate(part.parts):
            _draw(column, inside)
            if inside.skips:
                _sum(column, below[number - inside.skips] + 0.45 * GAP)
            below.append(column.y)
        _rise(column, framed)
        if framed:
            _frame(column, part, start)


def _rise(column: _Column, framed: bool) -> None:
    if framed:
        column.axes.plot([column.x, column.x], [column.y, column.y + GAP], **LINE)
        column.y += GAP


def _box(column: _Column, part: Part) -> None:
    axes, x, y = column.axes, column.x, column.y
    shade = next(shade for kind, shade in FILLS.items() if kind in part.box.lower())
    edge, middle = x - WIDE / 2, y + HIGH / 2
    _rounded(axes, (edge, y), (WIDE, HIGH), 0.09, facecolor=shade, edgecolor="#44606f", linewidth=1.0)
    times = f" × {part.repeats}" if part.repeats > 1 else ""
    # inside of a box the ink stays dark, on a dark page too
    axes.text(x, middle + 0.13 * bool(part.detail), f"{part.box}{times}", fontsize=9.5, color="#111111", **MIDDLE)
    if part.detail:
        axes.text(x, middle - 0.15, part.detail, fontsize=7.8, color="#333333", **MIDDLE)
    if part.parameters:
        count = short(part.repeats * part.parameters)
        axes.text(x + WIDE / 2 + 0.64, middle, count, va="center", fontsize=7.8, color=SOFT)
    if part.loops:
        back = {"arrowstyle": "->", "color": INK, "connectionstyle": "arc3,rad=1.4", "linewidth": 1.0}
        axes.annotate("", (edge, y + 0.14), (edge, y + HIGH - 0.14), arrowprops=back)
        axes.text(edge - 0.42, middle, "h", ha="right", va="center", fontsize=8.5)
    if part.reads:
        column.sources.append((edge, middle))
    column.y += HIGH


def _sum(column: _Column, start: float) -> None:
    axes, x, y = column.axes, column.x, column.y + SUM
    out = x + column.side * (WIDE / 2 + 0.34)
    axes.plot([x, out, out], [start, start, y], **LINE)
    _arrow(axes, (out, y), (x + column.side * SUM, y))
    axes.plot([x], [y], marker="o", markersize=10, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.0)
    axes.plot([x], [y], marker="+", markersize=8, color=INK, markeredgewidth=1.0)
    column.y += 2 * SUM


def _frame(column: _Column, part: Part, start: float) -> None:
    left, pad = column.x - WIDE / 2, 0.52
    size = WIDE + 2 * pad, column.y - start - 0.2
    _rounded(column.axes, (left - pad, start + 0.1), size, 0.16, facecolor="none", edgecolor=SOFT, linewidth=1.1)
    middle = (start + column.y) / 2
    column.axes.text(left - pad - 0.1, middle, f"{part.repeats} ×", fontsize=11, ha="right", va="center")


def _rounded(axes: Any, corner: Pair, size: Pair, radius: float, **look: Any) -> None:
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=f"round,pad=0,rounding_size={radius}", **look))


def _arrow(axes: Any, start: Pair, end: Pair) -> None:
    axes.annotate("", end, start, arrowprops=ARROW)
