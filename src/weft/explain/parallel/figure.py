"""Splits drawn: a row for each way, with the matrices cut in the colours of their processes, and every collective."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch.distributed.tensor import Partial, Placement

from weft.costs.units import byte_size
from weft.explain.parallel.parallel import FEATURES, TOKENS, Cut, Split, Splits, Way
from weft.explain.parallel.ranks import Collective
from weft.figures.picture import COLOURS, new_figure

INK, SOFT, GREY = "#000000", "#808080", "#bdbdbd"  # black is the page's own ink
FORWARD, BACKWARD = ("#333333", "#fefefe"), ("#f4f0e6", "#111111")  # a collective's bar, and the word in it
SHORT, LONG, THIN = 0.62, 0.98, 0.5  # d_model and d_ff, and tokens, as lengths
GAP, BARS, ROW, TEXT = 0.2, 0.86, 2.25, 4.9  # between parts; for two bars; of a row; of the words beside it
ARROW = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6}
BYTES = 2  # of a number, in bf16
Pair = tuple[float, float]


def title_of(way: Way, names: Sequence[str]) -> str:
    """'A by columns, B by rows'."""
    if way.first is None:
        return f"{names[0]} and {names[2]} whole on every process"
    return f"{names[0]} by {way.first}, {names[2]} by {way.second}" + ", sequence parallel" * way.sequence


def listed(collectives: Iterable[Collective]) -> str:
    """'all-gather, reduce-scatter', '2 all-reduces', or 'none'."""
    counts = Counter(each.kind for each in collectives)
    return ", ".join(kind if times == 1 else f"{times} {kind}s" for kind, times in counts.items()) or "none"


def share(part: int, whole: int) -> str:
    """'50%', '12.5%'."""
    return f"{100 * part / whole:.3g}%"


def draw(*blocks: Splits) -> Figure:
    """A row for each way of splitting a block, the best first; several blocks one below another."""
    above = 0.9 if len(blocks) == 1 else 1.5
    wide, high = 14.6 + TEXT, [ROW * len(splits.splits) + above + 0.1 for splits in blocks]
    figure = new_figure(0.56 * wide, 0.56 * sum(high))
    figure.set_layout_engine("none")  # everything has its place already
    for number, splits in enumerate(blocks):
        place = (0.0, sum(high[number + 1 :]) / sum(high), 1.0, high[number] / sum(high))
        axes: Any = figure.add_axes(place)
        axes.set_xlim(-0.1, wide - 0.1)
        axes.set_ylim(above - high[number], above)
        axes.axis("off")
        if len(blocks) > 1:
            axes.text(0, 1.2, f"{splits.block.name} on {splits.ranks} processes", va="center", fontsize=12)
        _key(axes, splits.ranks)
        for row, split in enumerate(splits.splits):
            axes.plot([0, wide - 0.2], [-ROW * row] * 2, color=SOFT, linewidth=0.5, alpha=0.6)
            _way(axes, -ROW * row, splits, split)
    return figure


def _way(axes: Any, top: float, splits: Splits, split: Split) -> None:
    """One row: its title, the drawing, and the numbers beside it."""
    known = " (Megatron)" if split.way == Way("columns", "rows") else ""
    place = splits.splits.index(split) + 1
    title = f"{place}. {title_of(split.way, splits.block.names)}{known}"
    axes.text(0, top - 0.12, title, va="top", fontsize=9, weight="bold")
    row = _Row(axes, top - 1.32, splits.ranks)
    row.block(splits, split)
    _numbers(axes, (row.x + 0.35, top - 0.42), splits, split)


@dataclass
class _Row:
    """A row that is being drawn, from the left to the right."""

    axes: Any
    y: float  # its middle
    ranks: int
    x: float = 0.0

    def block(self, splits: Splits, split: Split) -> None:
        """norm, A, f, B, and between them how the activations lie before a place and after it."""
        first, function, second = splits.block.names
        attends = splits.block.name == "Attention"
        middle = SHORT if attends else LONG
        self.function("norm")
        self.place("X", SHORT, split, 0)
        self.matrix(first, LONG, SHORT, split.way.first)
        self.place("Q, K, V" if attends else f"X{first}", LONG, split, 1)
        self.function(function)
        self.place("Y", middle, split, 2)
        self.matrix(second, SHORT, middle, split.way.second)
        self.place("Z", SHORT, split, 3)

    def function(self, name: str) -> None:
        """A box for what every process does with what it has."""
        wide = 0.3 + 0.125 * len(name)
        box = FancyBboxPatch(
            (self.x, self.y - 0.24), wide, 0.48, boxstyle="round,pad=0,rounding_size=0.1", facecolor="#f3ecd2",
            edgecolor=SOFT, linewidth=0.8,
        )  # fmt: skip
        self.axes.add_patch(box)
        self.axes.text(self.x + wide / 2, self.y, name, ha="center", va="center", fontsize=8, color="#111111")
        self.x += wide + GAP

    def matrix(self, name: str, wide: float, high: float, cut: Cut | None) -> None:
        """A weight, with its cuts."""
        self._name(name, wide, high, 8.5)
        self._rectangle((wide, high), cut)
        _outline(self.axes, (self.x, self.y), (wide, high), 1.3)
        self.x += wide + GAP

    def place(self, name: str, wide: float, split: Split, number: int) -> None:
        """A tensor before a place where processes may have to talk, the bars of collectives, and the tensor after."""
        before, after = split.layout[number]
        self._tensor(name, wide, before)
        bars = [(FORWARD, each) for each in split.forward[number]] + [
            (BACKWARD, each) for each in split.backward[number]
        ]
        start = self.x - GAP
        if not bars:
            self.axes.annotate("", (start + BARS - 0.06, self.y), (start + 0.06, self.y), arrowprops=ARROW)
        for at, ((fill, ink), each) in enumerate(bars):
            middle = start + BARS * (at + 1) / (len(bars) + 1)
            box = Rectangle((middle - 0.15, self.y - 0.78), 0.3, 1.56, facecolor=fill, edgecolor=SOFT, linewidth=0.8)
            self.axes.add_patch(box)
            self.axes.text(middle, self.y, each.kind, rotation=90, ha="center", va="center", fontsize=7.2, color=ink)
        self.x = start + BARS
        self._tensor("", wide, after)

    def _tensor(self, name: str, wide: float, placement: Placement) -> None:
        size = (wide, THIN)
        if isinstance(placement, Partial):
            self._sheets(wide)
        else:
            cut: dict[Placement, Cut] = {FEATURES: "columns", TOKENS: "rows"}
            self._rectangle(size, cut.get(placement))
            _outline(self.axes, (self.x, self.y), size, 0.6)
        if name:
            self._name(name, wide, THIN + 0.16 * isinstance(placement, Partial), 7.2)
        self.x += wide + GAP

    def _sheets(self, wide: float) -> None:
        """A part of the sum on every process: sheets, one above another."""
        shown = min(self.ranks, 4)
        step = 0.16 / (shown - 1)
        for number in range(shown):
            shift = 0.08 - step * number
            corner = (self.x - shift / 2, self.y + shift)
            _fill(self.axes, corner, (wide, THIN), _colour(number))
            _outline(self.axes, corner, (wide, THIN), 0.6)
        self.axes.text(self.x + wide / 2, self.y - 0.08, "+", ha="center", va="center", fontsize=10, color="#fefefe")

    def _rectangle(self, size: Pair, cut: Cut | None) -> None:
        if cut is None:
            _fill(self.axes, (self.x, self.y), size)
        else:
            _stripes(self.axes, (self.x, self.y), size, cut, self.ranks)

    def _name(self, name: str, wide: float, high: float, size: float) -> None:
        self.axes.text(self.x + wide / 2, self.y + high / 2 + 0.06, name, ha="center", va="bottom", fontsize=size)


def _colour(rank: int) -> tuple[str, float]:
    """A process's colour, and how strong; there are more processes than colours."""
    return COLOURS[rank % len(COLOURS)], 0.95 if rank // len(COLOURS) % 2 == 0 else 0.5


def _fill(axes: Any, place: Pair, size: Pair, colour: tuple[str, float] = (GREY, 1.0)) -> None:
    """A rectangle in one colour; `place` is the middle of its left edge."""
    corner = (place[0], place[1] - size[1] / 2)
    axes.add_patch(Rectangle(corner, *size, facecolor=colour[0], alpha=colour[1], linewidth=0))


def _stripes(axes: Any, place: Pair, size: Pair, cut: Cut, ranks: int) -> None:
    """A rectangle in stripes of the processes' colours, the first at the left or on top."""
    (x, y), (wide, high) = place, size
    for rank in range(ranks):
        name, alpha = _colour(rank)
        if cut == "columns":
            corner, one = (x + wide * rank / ranks, y - high / 2), (wide / ranks, high)
        else:
            corner, one = (x, y + high / 2 - high * (rank + 1) / ranks), (wide, high / ranks)
        axes.add_patch(Rectangle(corner, *one, facecolor=name, alpha=alpha, linewidth=0.4, edgecolor="#fefefe"))


def _outline(axes: Any, place: Pair, size: Pair, line: float) -> None:
    corner = (place[0], place[1] - size[1] / 2)
    axes.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor=INK, linewidth=line))


def _numbers(axes: Any, place: Pair, splits: Splits, split: Split) -> None:
    """What was measured, beside the row."""
    whole = splits.splits[-1]
    forward, backward = (byte_size(BYTES * numbers) for numbers in split.sent(splits.ranks))
    lines = [
        f"forward: {listed(each for place in split.forward for each in place)}",
        f"backward: {listed(each for place in split.backward[::-1] for each in place)}",
        f"sent: {forward} forward, {backward} backward",
        f"compute {share(split.flops, whole.flops)}, weights {share(split.weights, whole.weights)}",
        f"activations {share(split.activations, whole.activations)}",
        f"largest difference {max(split.differences):.0e}",
    ]
    for number, line in enumerate(lines):
        axes.text(place[0], place[1] - 0.29 * number, line, va="top", fontsize=7.6)


def _key(axes: Any, ranks: int) -> None:
    """What colours and bars stand for."""
    x, y = 0.0, 0.5

    def word(text: str, after: float = 0.35) -> None:
        nonlocal x
        axes.text(x, y, text, va="center", fontsize=8)
        x += 0.108 * len(text) + after

    shown = min(ranks, 4)
    for rank in range(shown):
        _fill(axes, (x, y), (0.3, 0.3), _colour(rank))
        x += 0.36
    word(f"process 0 to {ranks - 1}" if ranks <= 4 else f"process 0 to 3, and so on to {ranks - 1}")
    _fill(axes, (x, y), (0.3, 0.3))
    x += 0.36
    word("all of it on every process")
    row = _Row(axes, y, ranks, x + 0.05)
    row._sheets(0.4)
    x += 0.6
    word("a part of the sum on each")
    for (fill, _), text in ((FORWARD, "collective, forward"), (BACKWARD, "backward")):
        axes.add_patch(Rectangle((x, y - 0.2), 0.18, 0.4, facecolor=fill, edgecolor=SOFT, linewidth=0.8))
        x += 0.26
        word(text)
