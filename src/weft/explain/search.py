"""Greedy search, beam search and sampling beside each other, as trees of nodes and edges."""

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
from weft.figures.heatmap import shortened
from weft.figures.page import as_json
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.shaded import drawable, families, width_of

# pixels of a page, where web/search.js has some of them; of a figure, hundredths of an inch
ROW, BOX, FONT, SMALL = 26.0, 19.0, 12.5, 10.5
PAD, CURVE, EDGE, ROOT = 5.0, 13.0, 5.0, 7.0
BOLD = 1.14  # how much wider bold letters are
MAX_CHARACTERS = 12  # of a node that are shown
MIN_TREE_WIDTH = 240.0  # so that what it wrote has space below it
MAX_ROW_WIDTH = 900.0  # of trees side by side
STATES = ("pruned", "kept", "chosen")
TITLES = {"greedy": "Greedy search", "beam": "Beam search", "sampling": "Sampling"}


class Spot(NamedTuple):
    """Where a node stands: its left edge and middle, the label of its edge and where that begins, its parent's end."""

    text: str
    x: float
    y: float
    width: float
    label: str
    label_x: float
    start: tuple[float, float]

    @property
    def turn(self) -> float:
        """Where the edge has left its parent's column."""
        return self.label_x - CURVE


class Laid(NamedTuple):
    """A tree with a place for everything, nodes in their order: no two things overlap."""

    spots: list[Spot]
    root: float
    width: float
    height: float


@dataclass(frozen=True)
class SearchTrees(Picture):
    """The continuations of `prompt`, or its translations, that each search looked at."""

    prompt: str
    trees: tuple[SearchTree, ...]
    title: str = "Search trees"
    translates: bool = False

    module = "search.js"

    @property
    def about(self) -> str:  # type: ignore[override]
        """How to read it, and what greedy search missed here."""
        told = TEXTS["search"].format(what="a translation could begin" if self.translates else "the text could go on")
        found = {tree.name: tree.written[0].logprob for tree in self.trees if tree.written}
        if "greedy" in found and found.get("beam", -1e9) > found["greedy"] + 1e-6:
            both = f"log p {_number(found['greedy'])}, the beam's {_number(found['beam'])}"
            told += f" Here greedy search misses a likelier text: {both}."
        return told

    @cached_property
    def laid(self) -> list[Laid]:
        return [laid_out(tree) for tree in self.trees]

    def figure(self) -> Figure:
        sizes = [
            (laid.width, 34 + laid.height + 18 * len(_lines(tree)) + 10)
            for tree, laid in zip(self.trees, self.laid, strict=True)
        ]
        beside = sum(width for width, _ in sizes) + 30 * len(sizes) <= MAX_ROW_WIDTH
        width = sum(w + 30 for w, _ in sizes) if beside else max(w for w, _ in sizes) + 30
        height = max(h for _, h in sizes) if beside else sum(h for _, h in sizes)
        figure = new_figure(width / 100, height / 100)
        figure.set_layout_engine("none")
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        x = y = 0.0
        for tree, laid, (w, h) in zip(self.trees, self.laid, sizes, strict=True):
            _draw(axes, tree, laid, (x + 15, y))
            x, y = (x + w + 30, y) if beside else (x, y + h)
        return figure

    def data(self) -> dict[str, Any]:
        return super().data() | as_json({"about": self.about, "laid": self.laid})

    def text(self) -> str:
        return "\n".join("\n  ".join((TITLES[tree.name], *_lines(tree))) for tree in self.trees)


def laid_out(tree: SearchTree) -> Laid:
    """Places for a tree from left to right: a row a leaf, a column a token, likelier tokens above.

    A node stands among the rows of its own leaves and nobody else's, and each edge has its label in its child's row,
    after the columns' curves; so nothing overlaps.
    """
    nodes = tree.nodes
    children: dict[int, list[int]] = {number: [] for number in range(-1, len(nodes))}
    depth = {-1: 0}
    for number, node in enumerate(nodes):
        children[node.parent].append(number)
        depth[number] = depth[node.parent] + 1
    for each in children.values():
        each.sort(key=lambda number: -nodes[number].logprob)
    texts = [shortened(signs(node.text), MAX_CHARACTERS) for node in nodes]
    labels = [_edge(exp(node.logprob)) + (f" ×{node.count}" if node.count > 1 else "") for node in nodes]
    boxes = [width_of(text, FONT) + 2 * PAD for text in texts]
    columns = range(1, max(depth.values()) + 1)
    label_x, box_x, end = {}, {}, {0: EDGE + ROOT}
    for column in columns:
        there = [number for number in range(len(nodes)) if depth[number] == column]
        label_x[column] = end[column - 1] + CURVE
        box_x[column] = label_x[column] + BOLD * max(width_of(labels[number], SMALL) for number in there) + 5
        end[column] = box_x[column] + max(boxes[number] for number in there)
    found, waiting = [], [-1]
    while waiting:
        found.append(waiting.pop())
        waiting += children[found[-1]]
    rows: dict[int, float] = {}
    leaves = 0
    for number in reversed(found):  # each after its children, which stand in their order
        if children[number]:
            rows[number] = (rows[children[number][0]] + rows[children[number][-1]]) / 2
        else:
            rows[number], leaves = float(leaves), leaves + 1
    y = {number: EDGE + ROW * (row + 0.5) for number, row in rows.items()}
    spots = []
    for number, node in enumerate(nodes):
        column, parent = depth[number], node.parent
        start = EDGE + ROOT if parent < 0 else box_x[column - 1] + boxes[parent]
        at = texts[number], box_x[column], y[number], boxes[number], labels[number], label_x[column]
        spots.append(Spot(*at, (start, y[parent])))
    return Laid(spots, y[-1], max(MIN_TREE_WIDTH, end[columns[-1]] + EDGE), 2 * EDGE + ROW * leaves)


def signs(text: str) -> str:
    """A text with its whitespace as signs; a space between words stays one."""
    shown = "".join(WHITE.get(sign, " ") if sign.isspace() and sign != " " else sign for sign in text)
    return re.sub("^ +| +$", lambda spaces: WHITE[" "] * len(spaces[0]), shown)


def _edge(p: float) -> str:
    return "<0.01%" if p < 0.00005 else f"{100 * p:.{0 if p >= 0.1 else 1 if p >= 0.001 else 2}f}%"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _written(tree: SearchTree) -> list[tuple[str, str]]:
    counts = Counter((signs(each.text), _number(each.logprob)) for each in tree.written)
    return [(text, value + (f" ×{count}" if count > 1 else "")) for (text, value), count in counts.items()]


def _lines(tree: SearchTree) -> list[str]:
    return [f"{text}   log p {value}" for text, value in _written(tree)]


def _draw(axes: Any, tree: SearchTree, laid: Laid, at: tuple[float, float]) -> None:
    x, y = at[0], at[1] + 30
    font = {"family": families(), "parse_math": False, "va": "center_baseline"}
    axes.text(x, at[1] + 16, TITLES[tree.name], fontsize=FONT * 0.72, weight="bold", **font)
    axes.plot([x + EDGE + ROOT / 2], [y + laid.root], "o", color="black", ms=4)
    # what was chosen is drawn over the rest
    for node, spot in sorted(zip(tree.nodes, laid.spots, strict=True), key=lambda pair: STATES.index(pair[0].state)):
        chosen, pruned = node.state == "chosen", node.state == "pruned"
        ink = "#77736c" if pruned else "black"
        (from_x, from_y), turn, to = spot.start, spot.turn, y + spot.y
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
    for number, line in enumerate(_lines(tree)):
        axes.text(x, y + laid.height + 12 + 18 * number, drawable(line), fontsize=SMALL * 0.72, **font)
