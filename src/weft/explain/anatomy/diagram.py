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
COLUMN = 6.3  # from one stack to the next
INK, SOFT = "#000000", "#808080"  # black is the page's own ink
ARROW = {"arrowstyle": "->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}


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
        axes.text(stack.x, -0.28, what, ha="center", va="center", fontsize=9)
        stack.y = -0.1
        for part in column.parts:
            _draw(stack, part)
        _arrow(axes, stack.x, stack.y, stack.y + GAP)
        drawn.append(stack)
    if len(drawn) > 1:
        _connect(axes, drawn[0], drawn[1])
    elif drawn[0].sources:  # drawn without its encoder
        _from_afar(axes, drawn[0])
    return figure


def _reads(part: Part) -> bool:
    """Whether something in it reads the source."""
    return part.reads or any(map(_reads, part.parts))


def _height(part: Part) -> float:
    """How high a part is, with the arrow below it."""
    if part.skips:
        return GAP + 2 * SUM
    if part.box:
        return GAP + HIGH
    return sum(map(_height, part.parts)) + (2 * GAP if _framed(part) else 0.0)


def _framed(part: Part) -> bool:
    return bool(part.parts) and not part.box and part.repeats > 1


def _draw(column: _Column, part: Part) -> None:
    """Draw a part on top of what is there."""
    if part.skips or part.box:
        _arrow(column.axes, column.x, column.y, column.y + GAP)
        column.y += GAP
    if part.box:
        _box(column, part)
    elif part.parts:
        start = column.y
        if _framed(part):
            _rise(column)
        _inside(column, part.parts)
        if _framed(part):
            _rise(column)
            _frame(column, part, start)


def _rise(column: _Column) -> None:
    """A line through the edge of a frame."""
    column.axes.plot([column.x, column.x], [column.y, column.y + GAP], color=INK, linewidth=1.0)
    column.y += GAP


def _inside(column: _Column, parts: Sequence[Part]) -> None:
    """The parts of a block; a sum is fed from below those that it skips."""
    below = [column.y]
    for number, part in enumerate(parts):
        _draw(column, part)
        if part.skips:
            start = below[number - part.skips] + 0.45 * GAP
            _sum(column, start)
        below.append(column.y)


def _box(column: _Column, part: Part) -> None:
    axes, x, y = column.axes, column.x, column.y
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDE / 2, y), WIDE, HIGH, boxstyle="round,pad=0,rounding_size=0.09", facecolor=_fill(part),
            edgecolor="#44606f", linewidth=1.0,
        )
    )  # fmt: skip
    middle = y + HIGH / 2
    times = f" × {part.repeats}" if part.repeats > 1 else ""
    # inside of a box the ink stays dark, on a dark page too
    axes.text(x, middle + (0.13 if part.detail else 0), f"{part.box}{times}", ha="center", va="center", fontsize=9.5,
              color="#111111")  # fmt: skip
    if part.detail:
        axes.text(x, middle - 0.15, part.detail, ha="center", va="center", fontsize=7.8, color="#333333")
    if part.parameters:
        axes.text(
            x + WIDE / 2 + 0.64, middle, short(part.repeats * part.parameters), va="center", fontsize=7.8, color=SOFT
        )
    if part.loops:
        edge = x - WIDE / 2
        axes.annotate(
            "", (edge, y + 0.14), (edge, y + HIGH - 0.14),
            arrowprops={"arrowstyle": "->", "color": INK, "connectionstyle": "arc3,rad=1.4", "linewidth": 1.0},
        )  # fmt: skip
        axes.text(edge - 0.42, middle, "h", ha="right", va="center", fontsize=8.5)
    if part.reads:
        column.sources.append((x - WIDE / 2, middle))
    column.y += HIGH


def _fill(part: Part) -> str:
    """A light shade for each kind of part; the names tell them apart as well."""
    name = part.box.lower()
    if "norm" in name:
        return "#f3ecd2"
    if "attention" in name:
        return "#cfe3f2"
    if "embedding" in name or "positions" in name:
        return "#e4e4ea"
    return "#f6d9cc" if "logits" in name or "sentence" in name else "#d9ead6"


def _sum(column: _Column, start: float) -> None:
    """A circle with a plus, and the line around what is skipped."""
    axes, x, y = column.axes, column.x, column.y + SUM
    out = x + column.side * (WIDE / 2 + 0.34)
    axes.plot([x, out, out], [start, start, y], color=INK, linewidth=1.0)
    axes.annotate("", (x + column.side * SUM, y), (out, y), arrowprops=ARROW)
    axes.plot([x], [y], marker="o", markersize=10, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.0)
    axes.plot([x], [y], marker="+", markersize=8, color=INK, markeredgewidth=1.0)
    column.y += 2 * SUM


def _frame(column: _Column, part: Part, start: float) -> None:
    axes, x, pad = column.axes, column.x, 0.52
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDE / 2 - pad, start + 0.1), WIDE + 2 * pad, column.y - start - 0.2,
            boxstyle="round,pad=0,rounding_size=0.16", facecolor="none", edgecolor=SOFT, linewidth=1.1,
        )
    )  # fmt: skip
    axes.text(
        x - WIDE / 2 - pad - 0.1, (start + column.y) / 2, f"{part.repeats} ×", ha="right", va="center", fontsize=11
    )


def _arrow(axes: Any, x: float, low: float, high: float) -> None:
    axes.annotate("", (x, high), (x, low), arrowprops=ARROW)


def _connect(axes: Any, source: _Column, target: _Column) -> None:
    """From the top of the first stack to what reads it in the second."""
    between = target.x - WIDE / 2 - 1.25
    top = source.y + GAP
    for edge, y in target.sources:
        axes.plot([source.x, between, between], [top, top, y], color=INK, linewidth=1.0)
        axes.annotate("", (edge, y), (between, y), arrowprops=ARROW)


def _from_afar(axes: Any, target: _Column) -> None:
    for edge, y in target.sources:
        axes.annotate("", (edge, y), (edge - 0.9, y), arrowprops=ARROW)
        axes.text(edge - 0.6, y + 0.08, "source", ha="right", va="bottom", fontsize=8.5)
