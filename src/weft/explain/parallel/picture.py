"""`weft explain parallel`: is A to be split by columns or by rows? (lecture 1; Shoeybi et al. 2019)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch.distributed.tensor import Partial, Placement

from weft.costs.units import byte_size, short
from weft.explain.parallel.parallel import FEATURES, TOKENS, Cut, Sizes, Split, Splits, Way, measure
from weft.explain.parallel.ranks import Collective
from weft.explain.texts import TEXTS
from weft.figures.page import Section, html_tables
from weft.figures.picture import COLOURS, Picture, new_figure, svg
from weft.figures.tables import WIDTH, Table, text_tables

INK, SOFT, GREY = "#000000", "#808080", "#bdbdbd"  # black is the page's own ink
FORWARD, BACKWARD = ("#333333", "#fefefe"), ("#f4f0e6", "#111111")  # a collective's bar, and the word in it
SHORT, LONG, THIN = 0.62, 0.98, 0.5  # d_model and d_ff, and tokens, as lengths
GAP, BARS, ROW, TEXT = 0.2, 0.86, 2.25, 4.9  # between parts; for two bars; of a row; of the words beside it
ARROW = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6}
BYTES = 2  # of a number, in bf16
Pair = tuple[float, float]


# a narrow page scrolls it
DRAWN = Markup('<div class="scroll splits" role="region" tabindex="0" aria-label="{}">{}</div>')


@dataclass(frozen=True)
class ParallelSplits(Picture):
    """Every way of splitting an MLP and an attention block over processes."""

    title: str
    about: str
    blocks: tuple[Splits, ...]

    def figure(self) -> Figure:
        return _draw(*self.blocks)

    def sections(self) -> list[Section]:
        sections = []
        for block in self.blocks:
            title = f"{block.block.name} on {block.ranks} processes"
            drawn = DRAWN.format(title, Markup(svg(_draw(block), title)))
            sections.append(Section(title, _about(block), drawn + html_tables(_tables(block))))
        return sections

    def text(self) -> str:
        return text_tables([table for block in self.blocks for table in _tables(block)], WIDTH)


def parallel_splits(sizes: Sizes | None = None, ranks: int = 2) -> ParallelSplits:
    """An MLP and an attention block split over so many processes in every way, measured and compared with the whole."""
    blocks = measure(sizes or Sizes(), ranks)
    return ParallelSplits("Splitting a layer over processes", TEXTS["splits"], tuple(blocks))


def _about(splits: Splits) -> str:
    sizes, (first, function, second) = splits.sizes, splits.block.names
    wide = (sizes.d_ff, sizes.d_ff) if splits.block.name == "MLP" else (3 * sizes.d_model, sizes.d_model)
    columns = "whole heads" if splits.block.name == "Attention" else "some of the columns"
    words = {"first": first, "function": function, "second": second, "columns": columns}
    return TEXTS["splits-of"].format(**words, sizes=sizes, wide=wide, wrong=splits.wrong)


def _tables(splits: Splits) -> list[Table]:
    name, ranks = splits.block.name, splits.ranks
    corner = " → ".join((splits.block.names[0], splits.block.names[2]))
    collectives, costs, differences = [], [], []
    for split in splits.splits:
        first, second, sequence = split.way
        way = "whole" if first is None else f"{first} → {second}" + ", sequence" * sequence
        collectives.append((way, _listed(split.forward), _listed(split.backward[::-1])))
        sent = [byte_size(BYTES * numbers) for numbers in split.sent(ranks)]
        held = [byte_size(BYTES * numbers) for numbers in (split.weights, split.activations)]
        costs.append((way, *sent, short(split.flops), *held))
        differences.append((way, *(f"{each:.1e}" if each else "0" for each in split.differences)))
    late = next(split.late for split in splits.splits if split.late)
    remark = TEXTS["late-sums"].format(count=len(late), numbers=late[0].numbers)
    title = f"{name} on {ranks} processes"
    costs_of = (corner, "sent forward", "backward", "compute", "weights", "activations")
    off = (corner, "result", "gradient of X", "of the weights")
    return [
        Table((corner, "forward", "backward"), collectives, f"{title}: collectives", [remark], (0, 1, 2)),
        Table(costs_of, costs, f"{title}: what each process sends, computes and holds", [TEXTS["ring"]]),
        Table(off, differences, f"{title}: largest difference from the unsplit block, in float64"),
    ]


def _title(way: Way, names: Sequence[str]) -> str:
    if way.first is None:
        return f"{names[0]} and {names[2]} whole on every process"
    return f"{names[0]} by {way.first}, {names[2]} by {way.second}" + ", sequence parallel" * way.sequence


def _listed(places: Iterable[Iterable[Collective]]) -> str:
    counts = Counter(each.kind for place in places for each in place)
    return ", ".join(kind if times == 1 else f"{times} {kind}s" for kind, times in counts.items()) or "none"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g}%"


def _draw(*blocks: Splits) -> Figure:
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
            top, known = -ROW * row, " (Megatron)" if split.way == Way("columns", "rows") else ""
            axes.plot([0, wide - 0.2], [top, top], color=SOFT, linewidth=0.5, alpha=0.6)
            title = f"{row + 1}. {_title(split.way, splits.block.names)}{known}"
            axes.text(0, top - 0.12, title, va="top", fontsize=9, weight="bold")
            drawn = _Row(axes, top - 1.32, splits.ranks)
            drawn.block(splits, split)
            _numbers(axes, (drawn.x + 0.35, top - 0.42), splits, split)
    return figure


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
        look: dict[str, Any] = {"facecolor": "#f3ecd2", "edgecolor": SOFT, "linewidth": 0.8}
        look["boxstyle"] = "round,pad=0,rounding_size=0.1"
        self.axes.add_patch(FancyBboxPatch((self.x, self.y - 0.24), wide, 0.48, **look))
        self.axes.text(self.x + wide / 2, self.y, name, ha="center", va="center", fontsize=8, color="#111111")
        self.x += wide + GAP

    def matrix(self, name: str, wide: float, high: float, cut: Cut | None) -> None:
        self._name(name, wide, high, 8.5)
        self._rectangle((wide, high), cut, 1.3)
        self.x += wide + GAP

    def place(self, name: str, wide: float, split: Split, number: int) -> None:
        """A tensor before a place where processes may have to talk, the bars of collectives, and the tensor after."""
        before, after = split.layout[number]
        self._tensor(name, wide, before)
        ways = ((FORWARD, split.forward), (BACKWARD, split.backward))
        bars, start = [(look, each) for look, places in ways for each in places[number]], self.x - GAP
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
        if isinstance(placement, Partial):
            self._sheets(wide)
        else:
            cut: dict[Placement, Cut] = {FEATURES: "columns", TOKENS: "rows"}
            self._rectangle((wide, THIN), cut.get(placement), 0.6)
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

    def _rectangle(self, size: Pair, cut: Cut | None, line: float) -> None:
        if cut is None:
            _fill(self.axes, (self.x, self.y), size)
        else:
            _stripes(self.axes, (self.x, self.y), size, cut, self.ranks)
        _outline(self.axes, (self.x, self.y), size, line)

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
    whole = splits.splits[-1]
    forward, backward = (byte_size(BYTES * numbers) for numbers in split.sent(splits.ranks))
    lines = [
        f"forward: {_listed(split.forward)}",
        f"backward: {_listed(split.backward[::-1])}",
        f"sent: {forward} forward, {backward} backward",
        f"compute {_share(split.flops, whole.flops)}, weights {_share(split.weights, whole.weights)}",
        f"activations {_share(split.activations, whole.activations)}",
        f"largest difference {max(split.differences):.0e}",
    ]
    for number, line in enumerate(lines):
        axes.text(place[0], place[1] - 0.29 * number, line, va="top", fontsize=7.6)


def _key(axes: Any, ranks: int) -> None:
    x, y = 0.0, 0.5

    def word(text: str, after: float = 0.35) -> None:
        nonlocal x
        axes.text(x, y, text, va="center", fontsize=8)
        x += 0.108 * len(text) + after

    for rank in range(min(ranks, 4)):
        _fill(axes, (x, y), (0.3, 0.3), _colour(rank))
        x += 0.36
    word(f"process 0 to {ranks - 1}" if ranks <= 4 else f"process 0 to 3, and so on to {ranks - 1}")
    _fill(axes, (x, y), (0.3, 0.3))
    x += 0.36
    word("all of it on every process")
    _Row(axes, y, ranks, x + 0.05)._sheets(0.4)
    x += 0.6
    word("a part of the sum on each")
    for (fill, _), text in ((FORWARD, "collective, forward"), (BACKWARD, "backward")):
        axes.add_patch(Rectangle((x, y - 0.2), 0.18, 0.4, facecolor=fill, edgecolor=SOFT, linewidth=0.8))
        x += 0.26
        word(text)
