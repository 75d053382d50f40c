"""What the charts of a comparison are drawn with: logarithmic axes, labels that make way for each other, whiskers."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from weft.figures.charts import DASHES, grid
from weft.figures.page import template
from weft.figures.picture import COLOURS, Picture, new_figure, svg

GREY = "#808080"  # suits a light page and a dark one
INK = "#000000"  # the page's own ink
MARKERS = "s^Dv"
FONT = 9.5
LONGEST = 46  # characters of a name in a figure
BESIDE = 16  # of one that stands beside what it names


@dataclass(frozen=True)
class Drawing(Picture):
    """A chart by itself; `name` is that of its file."""

    name: str
    title: str
    about: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (4.3, 3.3)

    def figure(self) -> Figure:
        """The chart under its title."""
        figure = new_figure(*self.size)
        self.draw_on(figure.add_subplot())
        return figure

    def draw_on(self, axes: Any) -> None:
        """The chart on matplotlib's axes."""
        small = self.size[0] < 4
        title = folded(self.title, int(10 * self.size[0]), 3 if small else 2)
        axes.set_title(title, fontsize=9 if small else 10.5, loc="left", parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=FONT - 0.5)
        self.draw(axes)


@dataclass(frozen=True)
class Panels(Picture):
    """Small charts of the same kind, together in print."""

    name: str
    title: str
    about: str
    drawings: tuple[Drawing, ...]

    def figure(self) -> Figure:
        """At most four in a row."""
        columns = min(4, len(self.drawings))
        rows = -(-len(self.drawings) // columns)
        width, height = self.drawings[0].size
        figure = new_figure(columns * width, rows * height)
        for number, drawing in enumerate(self.drawings, 1):
            drawing.draw_on(figure.add_subplot(rows, columns, number))
        return figure


def save_figures(drawings: Sequence[Drawing | Panels], folder: Path | str) -> list[Path]:
    """Write each chart as .svg and .png under its name: loss-flops.svg, multipliers.png, …"""
    return [each.save(Path(folder) / f"{each.name}{suffix}") for each in drawings for suffix in (".svg", ".png")]


class Look(NamedTuple):
    """How a contender is drawn in every chart. What is `faint` has no name there."""

    colour: str
    marker: str
    dash: Any  # a line style of matplotlib
    faint: bool = False


BASELINE = Look(INK, "o", "-")
OTHERS = tuple(map(Look, COLOURS, MARKERS, DASHES))
FAINT = Look(GREY, ".", "-", faint=True)


def clipped(name: str, longest: int = LONGEST) -> str:
    """A name that fits into a chart."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def folded(name: str, width: int, lines: int = 2) -> str:
    """A name in a few lines at most."""
    return "\n".join(textwrap.wrap(name, width, max_lines=lines, placeholder=" …"))


# ---- logarithmic axes


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers over low … high on a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((math.log10(high) - math.log10(low)) / most))  # decades from one tick to the next
    decades = range(first - first % stride, last + 1, stride)
    found: list[float] = []
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        ticks = [step * 10.0**power for power in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most or steps == (1.0,):
            found = ticks
        if stride > 1:
            break
    if len(found) >= 3 or high > 8 * low:
        return found
    # so narrow a range is nearly even
    return [float(tick) for tick in MaxNLocator(min(most, 5)).tick_values(low, high) if low <= tick <= high]


def log_axis(axis: Any, label: str, named: Callable[[float], str], most: int = 7, keep: float = 0) -> None:
    """Make an axis logarithmic, with at most so many round ticks over its limits; `named` spells a tick.

    The value to `keep` is one of them, in the place of what would be close to it.
    """
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    limits = axis.axes.get_xlim() if axis.axis_name == "x" else axis.axes.get_ylim()
    set_scale("log")
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(limits)
    low, high = sorted(limits)
    ticks = log_ticks(low, high, most)
    if low <= keep <= high:
        apart = (high / low) ** 0.08
        ticks = sorted([*(tick for tick in ticks if not 1 / apart < tick / keep < apart), keep])
    axis.set_ticks(ticks, [named(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())
    axis.set_label_text(label, fontsize=FONT)
    grid(axis.axes)


def padded(values: Sequence[float], below: float = 0.06, above: float = 0.06) -> tuple[float, float]:
    """Limits of a logarithmic axis over values above zero, with some margin in parts of their range."""
    low, high = math.log(min(values)), math.log(max(values))
    width = max(high - low, 0.02)
    return math.exp(low - below * width), math.exp(high + above * width)


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scientific(number: float) -> str:
    """2e14 → '2·10¹⁴'."""
    digits, _, power = f"{number:.2e}".partition("e")
    head = f"{float(digits):g}"
    small = str(int(power)).translate(SUPERSCRIPTS)
    return f"10{small}" if head == "1" else f"{head}·10{small}"


# ---- names


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in [0, 1] moved apart to at least `gap`, each as little as its neighbours allow; the order stays."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    # labels that touch form a block around the mean of where they belong (pool adjacent violators)
    blocks: list[list[float]] = []  # (sum of wanted bottoms, labels)
    for place, index in enumerate(order):
        blocks.append([heights[index] - place * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    starts = [total / count for total, count in blocks for _ in range(int(count))]
    room = 1 - gap * (len(order) - 1)
    moved = [0.0] * len(heights)
    for place, index in enumerate(order):
        moved[index] = min(max(starts[place], 0.0), max(room, 0.0)) + place * gap
    return moved


class End(NamedTuple):
    """Where a line ends, and its name."""

    x: float
    y: float
    name: str
    look: Look


def name_lines(axes: Any, ends: Sequence[End]) -> None:
    """Names at the right of their lines, or below the chart where they are long. Limits must be set before."""
    if max((len(end.name) for end in ends), default=0) > BESIDE:
        _legend_below(axes, ends)
        return
    low, high = map(math.log, axes.get_ylim())
    heights = [(math.log(end.y) - low) / (high - low) for end in ends]
    inches = axes.figure.get_figheight() * 0.72  # of the axes, about
    for end, height, place in zip(ends, heights, spread(heights, FONT * 1.3 / 72 / inches), strict=True):
        style = {"color": end.look.colour, "linewidth": 0.7, "clip_on": False}
        axes.plot([end.x, axes.get_xlim()[1]], [end.y, end.y], linestyle=":", alpha=0.6, **style)
        axes.plot([1.0, 1.03], [height, place], transform=axes.transAxes, **style)
        label = axes.text(1.04, place, end.name, fontsize=FONT, color=end.look.colour, va="center", parse_math=False)
        label.set_transform(axes.transAxes)


def legend_height(names: Sequence[str]) -> float:
    """Inches that the names take below a chart; none where they stand beside their lines."""
    if all(len(name) <= BESIDE for name in names):
        return 0.0
    return sum(0.16 * (1 + folded(name, 50).count("\n")) for name in names)


def _legend_below(axes: Any, ends: Sequence[End]) -> None:
    handles = [
        Line2D([], [], color=end.look.colour, marker=end.look.marker, linestyle=end.look.dash, markersize=4)
        for end in ends
    ]
    legend = axes.figure.legend(
        handles, [str(number) for number in range(len(ends))], loc="outside lower left", frameon=False, fontsize=8.5
    )
    for text, end in zip(legend.get_texts(), ends, strict=True):  # set here, for a name may begin with any sign
        text.set_parse_math(False)
        text.set_text(folded(end.name, 50))


# ---- parts of a page


def html_top(told: str, facts: Mapping[str, str], command: str) -> Markup:
    """The result in words, the facts, and the command that repeats it."""
    return Markup(template("compare.html").module.top(told, facts, command))  # type: ignore[attr-defined]


def html_charts(drawings: Sequence[Drawing], kind: str = "cmp-charts") -> Markup:
    """Charts side by side, or one below another on a narrow page."""
    drawn = Markup("").join(Markup(svg(each.figure(), each.title)) for each in drawings)
    return Markup('<div class="charts {}">{}</div>').format(kind, drawn)


def html_notes(notes: Sequence[str]) -> Markup:
    """A list of sentences."""
    items = Markup("").join(Markup("<li>{}</li>").format(note) for note in notes)
    return Markup('<ul class="about cmp-notes">{}</ul>').format(items)


# ---- whiskers


class Whisker(NamedTuple):
    """A value with its interval; beyond what was measured, only the side on which the value lies is known."""

    name: str
    value: float
    low: float
    high: float
    label: str
    look: Look
    beyond: str | None = None


def whisker_size(rows: Sequence[Whisker]) -> tuple[float, float]:
    """Inches that so many rows take."""
    return 4.3, 1.1 + (0.42 if _names_above(rows) else 0.34) * len(rows)


def _names_above(rows: Sequence[Whisker]) -> bool:
    return any(len(row.name) > BESIDE for row in rows)


def draw_whiskers(axes: Any, rows: Sequence[Whisker], neutral: float) -> None:
    """A row each, from the top, with its name at the left, or above where it is long, and its value at the right.

    An interval that ends beyond what was measured goes to the edge. Limits must be set before.
    """
    edges = axes.get_xlim()
    above = _names_above(rows)
    for place, row in enumerate(rows):
        if row.beyond is None:
            ends = [max(row.low, edges[0]), min(row.high, edges[1])]
            axes.plot(ends, [place, place], color=row.look.colour, linewidth=1.6, marker="|", markersize=6)
        marker = {"above": ">", "below": "<", None: row.look.marker}[row.beyond]
        axes.plot([row.value], [place], color=row.look.colour, marker=marker, markersize=5)
        text = axes.text(1.03, place, row.label, fontsize=FONT, va="center", parse_math=False)
        text.set_transform(axes.get_yaxis_transform())
        if above:
            text = axes.text(0.0, place - 0.28, clipped(row.name, 58), fontsize=8.5, va="bottom", parse_math=False)
            text.set_transform(axes.get_yaxis_transform())
    for place in range(len(rows)):  # the line of no difference keeps clear of names
        axes.vlines(neutral, place - (0.22 if above else 0.5), place + (0.4 if above else 0.5), INK, linewidth=0.9)
    axes.set_yticks([] if above else range(len(rows)), [] if above else [row.name for row in rows], parse_math=False)
    axes.tick_params(axis="y", labelsize=FONT)
    axes.set_ylim(len(rows) - 0.5, -0.85 if above else -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
