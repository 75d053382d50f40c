"""Greedy search, beam search and sampling side by side, as trees of nodes and edges."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import exp
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from weft.decode.config import TreeSearch
from weft.decode.handmade import handmade_searches, read_tree
from weft.decode.tree import SearchNode, SearchTree
from weft.explain.reading import WHITE
from weft.explain.texts import TEXTS
from weft.figures.heatmap import shorten
from weft.figures.page import as_json
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.shaded import drawable, families, width_of
from weft.figures.tables import wrap

# Pixels on a page, where web/search.js repeats some of them; hundredths of an inch in a figure.
ROW, BOX, FONT, SMALL = 26.0, 19.0, 12.5, 10.5
PAD, CURVE, EDGE, ROOT = 5.0, 13.0, 5.0, 7.0
BOLD = 1.14  # width of bold text relative to normal text
MAX_CHARACTERS = 12  # characters of a token shown in a node
MIN_TREE_WIDTH = 240.0  # leaves space for the texts below a tree
MAX_ROW_WIDTH = 900.0  # trees side by side
STATES = ("unseen", "pruned", "kept", "chosen")
DASHES = {"unseen": (0, (1, 2)), "pruned": (0, (3, 2))}
INKS = {"unseen": "#8f8b84", "pruned": "#6d6a64"}
TITLES = {"greedy": "Greedy search", "beam": "Beam search", "sampling": "Sampling", "best": "Best of all paths"}


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
    weight: str = "−log p"  # of an edge; other weights are no probabilities

    module = "search.js"

    @property
    def about(self) -> str:  # type: ignore[override]
        what = "a translation could begin" if self.translates else "the text could continue"
        return f"{TEXTS['search'].format(what=what, weight=self.weight)} {self.loss}".rstrip()

    @property
    def loss(self) -> str:
        """Loss of greedy search against the best path that was found, in a sentence."""
        totals = {tree.name: -max(text.logprob for text in tree.written) for tree in self.trees if tree.written}
        if "greedy" not in totals:
            return ""
        best = min(totals, key=lambda name: totals[name])
        greedy, lowest = totals["greedy"], totals[best]
        if greedy <= lowest + 1e-6:
            return "Here no search finds a better path than greedy search."
        ratio = exp(greedy - lowest)
        shown = f"{ratio:,.0f}" if 100 <= ratio < 1e6 else f"{ratio:.3g}"
        times = f", {shown} times as likely" if self.weight == "−log p" else ""
        sums = f"{greedy:.2f} instead of {lowest:.2f} ({TITLES[best].lower()}{times})"
        return f"Here greedy search loses {greedy - lowest:.2f}: its path has {self.weight} {sums}."

    @cached_property
    def layouts(self) -> list[TreeLayout]:
        # between words the spaces need not be shown
        words = all(node.text.startswith(" ") for tree in self.trees for node in tree.nodes if node.id >= 0)
        return [tree_layout(tree, probabilities=self.weight == "−log p", words=words) for tree in self.trees]

    def results(self, tree: SearchTree) -> list[str]:
        """Return the texts that a search wrote with their weights and number of samples, and the probability left."""
        counts = Counter(tree.written)
        lines = []
        for output, count in counts.items():
            steps = [_decimal(-tree.nodes[n].logprob) for n in tree.nodes_to(output.leaf)]
            total = " + ".join(steps) + f" = {_decimal(-output.logprob)}" * (len(steps) > 1)
            lines.append(f"{visible(output.text)}   {self.weight} {total}" + (f" ×{count}" if count > 1 else ""))
        left = f"not considered to the end: {_percent(tree.left)} of the probability"
        return [*lines, *([left] if tree.left and self.weight == "−log p" else [])]

    def figure(self) -> Figure:
        pairs = list(zip(self.trees, self.layouts, strict=True))
        sizes = [(layout.width, layout.height + 18 * len(self.results(tree)) + 44) for tree, layout in pairs]
        origins, x, y, row_height = list[tuple[float, float]](), 0.0, 0.0, 0.0
        for width, height in sizes:
            if x and x + width + 30 > MAX_ROW_WIDTH:
                x, y, row_height = 0.0, y + row_height, 0.0
            origins.append((x + 15, y))
            x, row_height = x + width + 30, max(row_height, height)
        width = max(x + w for (x, _), (w, _) in zip(origins, sizes, strict=True)) + 15
        height = y + row_height
        figure = new_figure(width / 100, height / 100)
        figure.set_layout_engine("none")
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for (tree, layout), origin in zip(pairs, origins, strict=True):
            _draw(axes, tree, layout, results=self.results(tree), origin=origin)
        return figure

    def data(self) -> dict[str, Any]:
        computed = {"about": self.about, "layouts": self.layouts, "results": list(map(self.results, self.trees))}
        return super().data() | as_json(computed)

    def text(self) -> str:
        lines = ["\n  ".join((TITLES[tree.name], *self.results(tree))) for tree in self.trees]
        return "\n".join([*lines, *wrap(self.loss)])


def handmade(path: FilePath, settings: TreeSearch) -> SearchTrees:
    """Return the searches of a tree in a TOML or JSON file."""
    tree = read_tree(path)
    weight = "−log p" if tree.probabilities else "weight"
    return SearchTrees(tree.prompt, tuple(handmade_searches(tree, settings)), "Searches of a tree", weight=weight)


def tree_layout(tree: SearchTree, *, probabilities: bool = True, words: bool = False) -> TreeLayout:
    """Lay out a tree from left to right: one row per leaf, one column per token, likelier tokens above.

    A node is within the rows of its leaves, and an edge's label is in its child's row, after the column's curves; so
    nothing overlaps. With `words`, a token's leading space is not shown.
    """
    nodes = tree.nodes
    children: dict[int, list[int]] = {number: [] for number in range(-1, len(nodes))}
    depth = {-1: 0}
    for number, node in enumerate(nodes):
        children[node.parent].append(number)
        depth[number] = depth[node.parent] + 1
    for siblings in children.values():  # the rest of the probability is last
        siblings.sort(key=lambda number: (nodes[number].id < 0, -nodes[number].logprob))
    texts = [shorten(visible(node.text[words and node.id >= 0 :]), MAX_CHARACTERS) for node in nodes]
    labels = [_edge_label(node, probabilities) for node in nodes]
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


def _edge_label(node: SearchNode, probabilities: bool) -> str:
    parts = [_decimal(-node.logprob)] * (node.id >= 0) + [_percent(exp(node.logprob))] * probabilities
    return " · ".join(parts) + (f" ×{node.count}" if node.count > 1 else "")


def _percent(p: float) -> str:
    return "<0.01%" if p < 0.00005 else f"{100 * p:.{0 if p >= 0.1 else 1 if p >= 0.001 else 2}f}%"


def _decimal(value: float) -> str:
    return f"{value + 0.0:.2f}".replace("-", "−")


def _draw(axes: Any, tree: SearchTree, layout: TreeLayout, *, results: list[str], origin: tuple[float, float]) -> None:
    x, y = origin[0], origin[1] + 30
    font = {"family": families(), "parse_math": False, "va": "center_baseline"}
    axes.text(x, origin[1] + 16, TITLES[tree.name], fontsize=FONT * 0.72, weight="bold", **font)
    axes.plot([x + EDGE + ROOT / 2], [y + layout.root], "o", color="black", ms=4)
    pairs = zip(tree.nodes, layout.positions, strict=True)
    for node, spot in sorted(pairs, key=lambda pair: STATES.index(pair[0].state)):  # chosen nodes last, on top
        chosen, ink = node.state == "chosen", INKS.get(node.state, "black")
        from_x, from_y, turn, to = spot.start_x, spot.start_y, spot.label_x - CURVE, y + spot.y
        points = [(from_x, from_y), (turn, from_y), (turn + CURVE / 2, from_y), (turn + CURVE / 2, spot.y)]
        points += [(spot.label_x, spot.y), (spot.x, spot.y)]
        codes = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO]
        path = Path([(x + px, y + py) for px, py in points], codes)
        style: dict[str, Any] = {"lw": 2.0 if chosen else 0.8, "ls": DASHES.get(node.state, "-")}
        axes.add_patch(PathPatch(path, fill=False, ec=ink, **style))
        fill = SHADES(0.18) if chosen else "white"
        box = {**style, "lw": 1.4 if chosen else 0.7, "fc": fill, "ec": ink, "boxstyle": "round,pad=0,rounding_size=4"}
        axes.add_patch(FancyBboxPatch((x + spot.x, to - BOX / 2), spot.width, BOX, **box))
        weight, middle = "bold" if chosen else "normal", x + spot.x + spot.width / 2
        axes.text(middle, to, drawable(spot.text), fontsize=FONT * 0.68, color=ink, ha="center", **font)
        axes.text(x + spot.label_x + 2, to - 7, spot.label, fontsize=SMALL * 0.68, color=ink, weight=weight, **font)
    for number, line in enumerate(results):
        axes.text(x, y + layout.height + 12 + 18 * number, drawable(line), fontsize=SMALL * 0.72, **font)
