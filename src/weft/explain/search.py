"""Greedy search, beam search and sampling side by side, as trees of nodes and edges."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from weft.decode.tree import SearchTree
from weft.explain.reading import WHITE
from weft.explain.texts import TEXTS
from weft.figures.heatmap import shorten
from weft.figures.page import as_json
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.shaded import drawable, families, width_of

# Pixels on a page, where web/search.js repeats some of them; hundredths of an inch in a figure.
ROW, BOX, FONT, SMALL = 26.0, 19.0, 12.5, 10.5
PAD, CURVE, EDGE, ROOT = 5.0, 13.0, 5.0, 7.0
BOLD = 1.14  # width of bold text relative to normal text
MAX_CHARACTERS = 12  # characters of a token shown in a node
MIN_TREE_WIDTH = 240.0  # leaves space for the texts below a tree
MAX_ROW_WIDTH = 900.0  # trees side by side
STATES = ("pruned", "kept", "chosen")
TITLES = {"greedy": "Greedy search", "beam": "Beam search", "sampling": "Sampling"}


class NodePosition(NamedTuple):
    """Box of a node by its left edge and vertical middle, the label of its edge, and the start of the edge."""

    text: str
    x: float
    y: float
    width: float
    label: str
    label_x: float
    start_x: float
    start_y: float

    @property
    def turn(self) -> float:
        """x at which the edge leaves its parent's column."""
        return self.label_x - CURVE


class TreeLayout(NamedTuple):
    """Spots of a tree's nodes, in their order; nothing overlaps. `root` is the y of the root."""

    positions: list[NodePosition]
    root: float
    width: float
    height: float


@dataclass(frozen=True)
class SearchTrees(Picture):
    """Continuations of `prompt`, or translations of it, that each search considered."""

    prompt: str
    trees: tuple[SearchTree, ...]
    title: str = "Search trees"
    translates: bool = False

    module = "search.js"

    @property
    def about(self) -> str:  # type: ignore[override]
        """Explanation of the trees, and whether greedy search missed a likelier text."""
        what = "a translation could begin" if self.translates else "the text could continue"
        best = {tree.name: tree.written[0].logprob for tree in self.trees if tree.written}
        if "greedy" not in best or best.get("beam", -1e9) <= best["greedy"] + 1e-6:
            return TEXTS["search"].format(what=what)
        missed = f"log p {_decimal(best['greedy'])}, the beam's {_decimal(best['beam'])}"
        return f"{TEXTS['search'].format(what=what)} Here greedy search misses a likelier text: {missed}."

    @cached_property
    def layouts(self) -> list[TreeLayout]:
        return [tree_layout(tree) for tree in self.trees]

    def figure(self) -> Figure:
        pairs = list(zip(self.trees, self.layouts, strict=True))
        sizes = [(layout.width, layout.height + 18 * len(_output_lines(tree)) + 44) for tree, layout in pairs]
        beside = sum(width for width, _ in sizes) + 30 * len(sizes) <= MAX_ROW_WIDTH
        width = sum(w + 30 for w, _ in sizes) if beside else max(w for w, _ in sizes) + 30
        height = max(h for _, h in sizes) if beside else sum(h for _, h in sizes)
        figure = new_figure(width / 100, height / 100)
        figure.set_layout_engine("none")
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        x = y = 0.0
        for (tree, layout), (w, h) in zip(pairs, sizes, strict=True):
            _draw(axes, tree, layout, origin=(x + 15, y))
            x, y = (x + w + 30, y) if beside else (x, y + h)
        return figure

    def data(self) -> dict[str, Any]:
        return super().data() | as_json({"about": self.about, "layouts": self.layouts})

    def text(self) -> str:
        return "\n".join("\n  ".join((TITLES[tree.name], *_output_lines(tree))) for tree in self.trees)


def tree_layout(tree: SearchTree) -> TreeLayout:
    """Lay out a tree from left to right: one row per leaf, one column per token, likelier tokens above.

    A node is within the rows of its leaves, and an edge's label is in its child's row, after the column's curves; so
    nothing overlaps.
    """
    nodes = tree.nodes
    children: dict[int, list[int]] = {number: [] for number in range(-1, len(nodes))}
    depth = {-1: 0}
    for number, node in enumerate(nodes):
        children[node.parent].append(number)
        depth[number] = depth[node.parent] + 1
    for siblings in children.values():
        siblings.sort(key=lambda number: -nodes[number].logprob)
    texts = [shorten(visible(node.text), MAX_CHARACTERS) for node in nodes]
    labels = [_edge_label(exp(node.logprob)) + (f" ×{node.count}" if node.count > 1 else "") for node in nodes]
    widths = [width_of(text, FONT) + 2 * PAD for text in texts]
    columns = range(1, max(depth.values()) + 1)
    label_x, box_x, end = {}, {}, {0: EDGE + ROOT}
    for column in columns:
        members = [number for number in range(len(nodes)) if depth[number] == column]
        label_x[column] = end[column - 1] + CURVE
        box_x[column] = label_x[column] + BOLD * max(width_of(labels[number], SMALL) for number in members) + 5
        end[column] = box_x[column] + max(widths[number] for number in members)
    preorder, waiting = [], [-1]
    while waiting:
        preorder.append(waiting.pop())
        waiting += children[preorder[-1]]
    rows: dict[int, float] = {}
    leaves = 0
    for number in reversed(preorder):  # children before their parents, in order
        if children[number]:
            rows[number] = (rows[children[number][0]] + rows[children[number][-1]]) / 2
        else:
            rows[number], leaves = float(leaves), leaves + 1
    y = {number: EDGE + ROW * (row + 0.5) for number, row in rows.items()}
    positions = []
    for number, node in enumerate(nodes):
        column, parent = depth[number], node.parent
        start_x = EDGE + ROOT if parent < 0 else box_x[column - 1] + widths[parent]
        edge: dict[str, Any] = {"label": labels[number], "label_x": label_x[column]}
        edge |= {"start_x": start_x, "start_y": y[parent]}
        positions.append(NodePosition(texts[number], box_x[column], y[number], width=widths[number], **edge))
    width = max(MIN_TREE_WIDTH, end[columns[-1]] + EDGE)
    return TreeLayout(positions, root=y[-1], width=width, height=2 * EDGE + ROW * leaves)


def visible(text: str) -> str:
    """Return a text with visible whitespace, except single spaces between words."""
    marked = "".join(WHITE.get(char, " ") if char.isspace() and char != " " else char for char in text)
    return re.sub("^ +| +$", lambda spaces: WHITE[" "] * len(spaces[0]), marked)


def _edge_label(p: float) -> str:
    return "<0.01%" if p < 0.00005 else f"{100 * p:.{0 if p >= 0.1 else 1 if p >= 0.001 else 2}f}%"


def _decimal(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _output_lines(tree: SearchTree) -> list[str]:
    """Return the texts that a search wrote, each with log p and its number of samples."""
    counts = Counter((visible(output.text), _decimal(output.logprob)) for output in tree.written)
    return [f"{text}   log p {p}" + (f" ×{count}" if count > 1 else "") for (text, p), count in counts.items()]


def _draw(axes: Any, tree: SearchTree, layout: TreeLayout, *, origin: tuple[float, float]) -> None:
    x, y = origin[0], origin[1] + 30
    font = {"family": families(), "parse_math": False, "va": "center_baseline"}
    axes.text(x, origin[1] + 16, TITLES[tree.name], fontsize=FONT * 0.72, weight="bold", **font)
    axes.plot([x + EDGE + ROOT / 2], [y + layout.root], "o", color="black", ms=4)
    # Chosen nodes are drawn last, on top.
    for node, spot in sorted(
        zip(tree.nodes, layout.positions, strict=True), key=lambda pair: STATES.index(pair[0].state)
    ):
        chosen, pruned = node.state == "chosen", node.state == "pruned"
        ink = "#77736c" if pruned else "black"
        from_x, from_y, turn, to = spot.start_x, spot.start_y, spot.turn, y + spot.y
        points = [(from_x, from_y), (turn, from_y), (turn + CURVE / 2, from_y), (turn + CURVE / 2, spot.y)]
        points += [(spot.label_x, spot.y), (spot.x, spot.y)]
        codes = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO]
        path = Path([(x + px, y + py) for px, py in points], codes)
        style: dict[str, Any] = {"lw": 2.0 if chosen else 0.8, "ls": (0, (3, 2)) if pruned else "-"}
        axes.add_patch(PathPatch(path, fill=False, ec=ink, **style))
        fill = SHADES(0.18) if chosen else "white"
        box = {**style, "lw": 1.4 if chosen else 0.7, "fc": fill, "ec": ink, "boxstyle": "round,pad=0,rounding_size=4"}
        axes.add_patch(FancyBboxPatch((x + spot.x, to - BOX / 2), spot.width, BOX, **box))
        weight, middle = "bold" if chosen else "normal", x + spot.x + spot.width / 2
        axes.text(middle, to, drawable(spot.text), fontsize=FONT * 0.68, color=ink, ha="center", **font)
        axes.text(x + spot.label_x + 2, to - 7, spot.label, fontsize=SMALL * 0.68, color=ink, weight=weight, **font)
    for number, line in enumerate(_output_lines(tree)):
        axes.text(x, y + layout.height + 12 + 18 * number, drawable(line), fontsize=SMALL * 0.72, **font)
