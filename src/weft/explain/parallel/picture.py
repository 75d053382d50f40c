"""`weft explain parallel`: should A be split by columns or by rows? (lecture 1; Shoeybi et al. 2019)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch.distributed.tensor import Partial, Placement

from weft.costs.units import byte_size, short
from weft.explain.parallel.parallel import FEATURES, TOKENS, BlockSizes, BlockSplits, MeasuredSplit, SplitBy, measure
from weft.explain.parallel.ranks import Collective
from weft.explain.texts import TEXTS
from weft.figures.page import Section, html_tables
from weft.figures.picture import COLOURS, Picture, inline_svg, new_figure
from weft.figures.tables import WIDTH, Table, text_tables

INK, SOFT, GREY = "#000000", "#808080", "#bdbdbd"  # black becomes the page's ink
FORWARD, BACKWARD = ("#333333", "#fefefe"), ("#f4f0e6", "#111111")  # fill and text colour of a collective's bar
SHORT, LONG, THIN = 0.62, 0.98, 0.5  # drawn lengths of d_model, d_ff and tokens
GAP, BARS, ROW, ACROSS = 0.2, 0.86, 2.95, 14.7  # between parts; for two bars; height and width of a row
ARROW = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 6}
BF16_BYTES = 2
MAX_SHEETS = 4  # partial sums drawn as sheets, and processes in the key
Pair = tuple[float, float]

SCROLLING = Markup('<div class="scroll splits" role="region" tabindex="0" aria-label="{}">{}</div>')


@dataclass(frozen=True)
class ParallelSplits(Picture):
    """Every split of an MLP and an attention block over processes."""

    blocks: tuple[BlockSplits, ...]

    title = "Splitting a layer over processes"
    about = TEXTS["splits"]

    def figure(self) -> Figure:
        return _draw(*self.blocks)

    def sections(self) -> list[Section]:
        sections = []
        for block in self.blocks:
            title = f"{block.block.name} on {block.ranks} processes"
            rows = [_draw(block, rows=slice(n, n + 1)) for n in range(len(block.splits))]  # a page breaks between them
            drawn = SCROLLING.format(title, Markup("").join(Markup(inline_svg(row, title)) for row in rows))
            sizes, (first, function, second), mlp = block.sizes, block.block.names, block.block.name == "MLP"
            wide = (sizes.d_ff, sizes.d_ff) if mlp else (3 * sizes.d_model, sizes.d_model)
            words: dict[str, Any] = {"first": first, "function": function, "second": second, "sizes": sizes}
            words |= {"wide": wide, "columns": "some of the columns" if mlp else "whole heads"}
            about = TEXTS["splits-of"].format(**words, wrong=block.partial_sum_error)
            sections.append(Section(title, about, drawn + html_tables(_tables(block))))
        return sections

    def text(self) -> str:
        return text_tables([table for block in self.blocks for table in _tables(block)], WIDTH)


def parallel_splits(sizes: BlockSizes | None = None, ranks: int = 2) -> ParallelSplits:
    """Measure every split of an MLP and an attention block over this many processes against the unsplit block."""
    return ParallelSplits(tuple(measure(sizes or BlockSizes(), ranks)))


def _tables(splits: BlockSplits) -> list[Table]:
    ranks, corner = splits.ranks, " → ".join((splits.block.names[0], splits.block.names[2]))
    collectives, costs, differences = [], [], []
    for split in splits.splits:
        first, second, sequence = split.scheme
        name = "whole" if first is None else f"{first} → {second}" + ", sequence" * sequence
        collectives.append((name, _listed(split.forward), _listed(split.backward[::-1])))
        sent = [byte_size(BF16_BYTES * elements) for elements in split.sent(ranks)]
        held = [byte_size(BF16_BYTES * elements) for elements in (split.weights, split.activations)]
        costs.append((name, *sent, short(split.flops), *held))
        differences.append((name, *(f"{each:.1e}" if each else "0" for each in split.differences)))
    deferred = next(split.deferred for split in splits.splits if split.deferred)
    remark = TEXTS["late-sums"].format(count=len(deferred), numbers=deferred[0].elements)
    title = f"{splits.block.name} on {ranks} processes"
    cost_header = (corner, "sent forward", "backward", "compute", "weights", "activations")
    difference_header = (corner, "result", "gradient of X", "of the weights")
    return [
        Table((corner, "forward", "backward"), collectives, f"{title}: collectives", [remark], text=(0, 1, 2)),
        Table(cost_header, costs, f"{title}: what each process sends, computes and holds", [TEXTS["ring"]]),
        Table(difference_header, differences, f"{title}: largest difference from the unsplit block, in float64"),
    ]


def _listed(groups: Iterable[Iterable[Collective]]) -> str:
    counts = Counter(each.kind for group in groups for each in group)
    return ", ".join(kind if times == 1 else f"{times} {kind}s" for kind, times in counts.items()) or "none"


def _draw(*blocks: BlockSplits, rows: slice = slice(None)) -> Figure:
    """Draw one row per split of a block, the best first, below a key; several blocks one below another."""
    above = 0.0 if rows.start else 0.9 if len(blocks) == 1 else 1.5
    heights = [ROW * len(splits.splits[rows]) + above + 0.1 for splits in blocks]
    figure = new_figure(0.56 * ACROSS, 0.56 * sum(heights))
    figure.set_layout_engine("none")
    for number, splits in enumerate(blocks):
        bottom, height = sum(heights[number + 1 :]) / sum(heights), heights[number] / sum(heights)
        axes: Any = figure.add_axes((0.0, bottom, 1.0, height))
        axes.set(xlim=(-0.1, ACROSS - 0.1), ylim=(above - heights[number], above))
        axes.axis("off")
        if len(blocks) > 1:
            axes.text(0, 1.2, f"{splits.block.name} on {splits.ranks} processes", va="center", fontsize=12)
        if not rows.start:
            _draw_key(axes, splits.ranks)
        for row, (number, split) in enumerate(list(enumerate(splits.splits, 1))[rows]):
            top, scheme = -ROW * row, split.scheme
            axes.plot([0, ACROSS - 0.2], [top, top], color=SOFT, linewidth=0.5, alpha=0.6)
            first, _, second = splits.block.names
            title = f"{first} by {scheme.first}, {second} by {scheme.second}" + ", sequence parallel" * scheme.sequence
            title = f"{first} and {second} whole on every process" if scheme.first is None else title
            known = " (Megatron)" if scheme == ("columns", "rows", False) else ""
            axes.text(0, top - 0.12, f"{number}. {title}{known}", va="top", fontsize=9, weight="bold")
            _SplitRow(axes, top - 1.32, splits.ranks).draw(splits, split)
            axes.text(0, top - 2.28, _summary(splits, split), va="top", fontsize=9)
    return figure


@dataclass
class _SplitRow:
    """Row being drawn, from left to right."""

    axes: Any
    y: float  # middle
    ranks: int
    x: float = 0.0

    def draw(self, splits: BlockSplits, split: MeasuredSplit) -> None:
        """Draw norm, A, f and B, and between them the activations before and after the collectives."""
        first, function, second = splits.block.names
        attends = splits.block.name == "Attention"
        middle = SHORT if attends else LONG
        self.function("norm")
        self.collectives("X", split, 0, width=SHORT)
        self.matrix(first, split.scheme.first, (LONG, SHORT))
        self.collectives("Q, K, V" if attends else f"X{first}", split, 1, width=LONG)
        self.function(function)
        self.collectives("Y", split, 2, width=middle)
        self.matrix(second, split.scheme.second, (SHORT, middle))
        self.collectives("Z", split, 3, width=SHORT)

    def function(self, name: str) -> None:
        """Draw a box for a function that every process applies to its data."""
        width = 0.3 + 0.125 * len(name)
        look: dict[str, Any] = {"facecolor": "#f3ecd2", "edgecolor": SOFT, "boxstyle": "round,pad=0,rounding_size=0.1"}
        self.axes.add_patch(FancyBboxPatch((self.x, self.y - 0.24), width, 0.48, linewidth=0.8, **look))
        self.axes.text(self.x + width / 2, self.y, name, ha="center", va="center", fontsize=9, color="#111111")
        self.x += width + GAP

    def matrix(self, name: str, split_by: SplitBy | None, size: Pair) -> None:
        self._name(name, size, 9.5)
        self._rectangle(size, split_by, 1.3)
        self.x += size[0] + GAP

    def collectives(self, name: str, split: MeasuredSplit, index: int, *, width: float) -> None:
        """Draw a tensor, the bars of the collectives at this index, and the tensor after them."""
        before, after = split.placements[index]
        self._tensor(name, width, before)
        passes = ((FORWARD, split.forward), (BACKWARD, split.backward))
        bars, start = [(look, each) for look, groups in passes for each in groups[index]], self.x - GAP
        if not bars:
            self.axes.annotate("", (start + BARS - 0.06, self.y), (start + 0.06, self.y), arrowprops=ARROW)
        for number, ((fill, ink), each) in enumerate(bars):
            middle = start + BARS * (number + 1) / (len(bars) + 1)
            _patch(self.axes, (middle - 0.15, self.y), (0.3, 1.74), facecolor=fill, edgecolor=SOFT, linewidth=0.8)
            self.axes.text(middle, self.y, each.kind, rotation=90, ha="center", va="center", fontsize=9, color=ink)
        self.x = start + BARS
        self._tensor("", width, after)

    def _tensor(self, name: str, width: float, placement: Placement) -> None:
        partial = isinstance(placement, Partial)
        if partial:
            self.sheets(width)
        else:
            split_by: dict[Placement, SplitBy] = {FEATURES: "columns", TOKENS: "rows"}
            self._rectangle((width, THIN), split_by.get(placement), 0.6)
        if name:
            self._name(name, (width, THIN + 0.16 * partial), 9)
        self.x += width + GAP

    def sheets(self, width: float) -> None:
        """Draw a partial sum on every process, as overlapping sheets."""
        count = min(self.ranks, MAX_SHEETS)
        for rank in range(count):
            shift = 0.08 - 0.16 / (count - 1) * rank
            corner = (self.x - shift / 2, self.y + shift)
            _patch(self.axes, corner, (width, THIN), **_colour(rank))
            _patch(self.axes, corner, (width, THIN), **_outline(0.6))
        self.axes.text(self.x + width / 2, self.y - 0.08, "+", ha="center", va="center", fontsize=10, color="#fefefe")

    def _rectangle(self, size: Pair, split_by: SplitBy | None, line: float) -> None:
        """Draw a rectangle in stripes of the processes' colours, the first at the left or on top; grey if not split."""
        (x, y), (width, height), ranks = (self.x, self.y), size, self.ranks
        if split_by is None:
            _patch(self.axes, (x, y), size, facecolor=GREY, alpha=1.0, linewidth=0)
        for rank in range(ranks) if split_by else ():
            stripe = {**_colour(rank), "linewidth": 0.4, "edgecolor": "#fefefe"}
            corner, shard = (x + width * rank / ranks, y - height / 2), (width / ranks, height)
            if split_by == "rows":
                corner, shard = (x, y + height / 2 - height * (rank + 1) / ranks), (width, height / ranks)
            self.axes.add_patch(Rectangle(corner, *shard, **stripe))
        _patch(self.axes, (x, y), size, **_outline(line))

    def _name(self, name: str, size: Pair, font_size: float) -> None:
        x, y = self.x + size[0] / 2, self.y + size[1] / 2 + 0.06
        self.axes.text(x, y, name, ha="center", va="bottom", fontsize=font_size)


def _patch(axes: Any, left_middle: Pair, size: Pair, **look: Any) -> None:
    axes.add_patch(Rectangle((left_middle[0], left_middle[1] - size[1] / 2), *size, **look))


def _colour(rank: int) -> dict[str, Any]:
    """Return the fill of a process; colours repeat in a second strength."""
    alpha = 0.95 if rank // len(COLOURS) % 2 == 0 else 0.5
    return {"facecolor": COLOURS[rank % len(COLOURS)], "alpha": alpha, "linewidth": 0}


def _outline(line: float) -> dict[str, Any]:
    return {"facecolor": "none", "edgecolor": INK, "linewidth": line}


def _summary(splits: BlockSplits, split: MeasuredSplit) -> str:
    whole = splits.splits[-1]
    forward, backward = (byte_size(BF16_BYTES * elements) for elements in split.sent(splits.ranks))
    names = ("flops", "weights", "activations")
    compute, weights, activations = (f"{100 * getattr(split, name) / getattr(whole, name):.3g}%" for name in names)
    collectives = f"forward: {_listed(split.forward)} · backward: {_listed(split.backward[::-1])}"
    shares = f"compute {compute}, weights {weights}, activations {activations} of the unsplit block's"
    sent = f"sent: {forward} forward, {backward} backward"
    return f"{collectives} · {sent}\n{shares} · largest difference {max(split.differences):.0e}"


def _draw_key(axes: Any, ranks: int) -> None:
    x, y = 0.0, 0.5

    def write(text: str) -> None:
        nonlocal x
        axes.text(x, y, text, va="center", fontsize=9)
        x += 0.115 * len(text) + 0.25

    for rank in range(min(ranks, MAX_SHEETS)):
        _patch(axes, (x, y), (0.3, 0.3), **_colour(rank))
        x += 0.36
    write(f"process 0 to {ranks - 1}" if ranks <= MAX_SHEETS else f"process 0 to 3, … {ranks - 1}")
    _patch(axes, (x, y), (0.3, 0.3), facecolor=GREY, alpha=1.0, linewidth=0)
    x += 0.36
    write("whole on every process")
    _SplitRow(axes, y, ranks, x + 0.05).sheets(0.4)
    x += 0.6
    write("partial sum on each")
    for (fill, _), text in ((FORWARD, "collective, forward"), (BACKWARD, "backward")):
        _patch(axes, (x, y), (0.18, 0.4), facecolor=fill, edgecolor=SOFT, linewidth=0.8)
        x += 0.26
        write(text)
