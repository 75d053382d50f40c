"""Attention in print: the heat map of a head, the grid of all heads, and the lines that follow a word."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.figures.picture import SHADES, Picture, new_figure

Kind = Literal["encoder", "decoder", "cross"]
Weights = NDArray[np.float32]

NAMES: dict[Kind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "attention to the source",
}
MOST_LABELS = 60  # tokens that each get a label
MOST_CELLS = 200  # along a side of a printed map; longer texts are pooled
MOST_WRITTEN = 10  # tokens whose weights are still written into the cells
LONGEST_LABEL = 14
# Attention spreads over all orders of size. The square root keeps a weight of 0.01 in sight beside one of 1.
SHADE = "the stronger the shade, the larger the weight, whose square root it follows"
FAINTEST = 0.02  # a line of less weight is not drawn, unless it is its head's heaviest


class KindMaps(NamedTuple):
    """All attention of one kind: weights (layers, heads, time, source time), and the tokens of both sides."""

    kind: Kind
    weights: Weights
    queries: list[str]
    keys: list[str]


@dataclass(frozen=True, eq=False)
class HeadMap(Picture):
    """Weights (time, source time) of some queries over some keys, which begin at token `start` of each side."""

    title: str
    about: str
    weights: Weights
    queries: list[str]
    keys: list[str]
    start: tuple[int, int] = (0, 0)

    def figure(self) -> Figure:
        """The heat map, queries in rows; of a long text each cell is the largest of a block of weights."""
        weights, block = pooled(self.weights, MOST_CELLS)
        rows, columns = weights.shape
        longest = max(rows, columns)
        cell = 9.0 / longest if longest > MOST_LABELS else 0.42 if longest <= MOST_WRITTEN else 0.2
        width = max(2.4, columns * cell) + _margin(self.queries) + 0.9
        figure = new_figure(width, max(1.6, rows * cell) + _margin(self.keys) + 0.7)
        axes: Any = figure.add_subplot()
        norm: Any = PowerNorm(0.5, vmin=0.0, vmax=float(weights.max()) or 1.0)
        image = axes.imshow(weights, cmap=SHADES, norm=norm, interpolation="nearest")
        _tokens(axes.xaxis, self.keys, self.start[1], block)
        _tokens(axes.yaxis, self.queries, self.start[0], block)
        axes.tick_params(axis="x", rotation=90)
        axes.xaxis.tick_top()
        axes.set_xlabel("key: attended to")
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("query: attends")
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        if longest <= MOST_WRITTEN and block == 1:
            for (row, column), weight in np.ndenumerate(weights):
                color = "white" if norm(weight) > 0.55 else "black"
                axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=color, fontsize=7)
        else:
            bar = figure.colorbar(image, shrink=0.6, aspect=25, pad=0.02)
            bar.outline.set_linewidth(0.5)
        return figure

    def text(self) -> str:
        """The strongest keys of each query."""
        wide = max(len(shortened(label)) for label in self.queries)
        lines = []
        for row, label in list(enumerate(self.queries))[:40]:
            found = [
                f"{shortened(self.keys[key])} {self.weights[row, key]:.2f}" for key in strongest(self.weights[row])
            ]
            lines.append(f"{row + self.start[0]:>4}  {shortened(label):<{wide}}  → {',  '.join(found)}"[:79])
        more = len(self.queries) - 40
        return "\n".join([self.title, *lines, *([f"      … {more} more tokens"] if more > 0 else [])])


@dataclass(frozen=True, eq=False)
class LineView(Picture):
    """What the tokens `chosen` of a text attend to, in some heads of a layer: weights (heads, chosen, source time)."""

    title: str
    about: str
    weights: Weights
    heads: list[int]
    chosen: list[int]
    queries: list[str]
    keys: list[str]

    def figure(self) -> Figure:
        """Two columns of tokens with lines between them, and beside each key how much each head gives it."""
        left, right = self._shown()
        colours = head_colours(len(self.heads))
        strip = 0.16 * len(self.heads)
        heights = max(len(left), len(right), 4)
        longest_left, longest_right = (_margin(labels) for labels in (self.queries, self.keys))
        width = longest_left + 2.6 + longest_right + strip + 0.4
        figure = new_figure(max(width, 4.6), 0.21 * heights + 0.9)
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        axes: Any = figure.add_subplot()
        axes.set(xlim=(-longest_left, width - longest_left), ylim=(heights - 0.2, -1.6))
        axes.axis("off")
        at_left = {place: row for row, place in enumerate(left)}
        at_right = {place: row for row, place in enumerate(right)}
        for place, row in at_left.items():
            bold = {"weight": "bold"} if place in self.chosen else {"color": "#666666"}
            axes.text(
                -0.06, row, _numbered(self.queries, place), ha="right", va="center", size=9, parse_math=False, **bold
            )
        for place, row in at_right.items():
            axes.text(2.66, row, _numbered(self.keys, place), ha="left", va="center", size=9, parse_math=False)
        for marks, x, side in ((gaps(left), -0.06, "right"), (gaps(right), 2.66, "left")):
            for row in marks:
                axes.text(x, row + 0.5, "⋯", ha=side, va="center", size=8, color="#666666")
        for number, colour in enumerate(colours):
            # the lines of the heads end beside each other, so that none hides the next
            aside = 0.6 * ((number + 0.5) / len(colours) - 0.5)
            for order, query in enumerate(self.chosen):
                for key, weight in drawn_lines(self.weights[number, order], at_right):
                    ends = [at_left[query] + aside, at_right[key] + aside]
                    axes.plot([0, 2.6], ends, color=colour, lw=0.5 + 4 * weight, alpha=0.25 + 0.75 * weight)
        begin = 2.66 + longest_right + 0.1
        given = self.weights.mean(axis=1)
        for number, (head, colour) in enumerate(zip(self.heads, colours, strict=True)):
            x = begin + 0.16 * number
            axes.text(x + 0.07, -0.9, str(head), ha="center", va="center", size=7 if head < 10 else 5.5)
            for key, row in at_right.items():
                alpha = float(np.sqrt(given[number, key]))
                axes.fill([x, x + 0.14, x + 0.14, x], [row - 0.42, row - 0.42, row + 0.42, row + 0.42],
                          facecolor=colour, alpha=alpha, lw=0)  # fmt: skip
                axes.fill([x, x + 0.14, x + 0.14, x], [row - 0.42, row - 0.42, row + 0.42, row + 0.42],
                          facecolor="none", edgecolor="#cccccc", lw=0.3)  # fmt: skip
        axes.text(begin - 0.06, -0.9, "head", ha="right", va="center", size=7)
        return figure

    def text(self) -> str:
        """The strongest keys in each head."""
        given = self.weights.mean(axis=1)
        lines = []
        for number, head in enumerate(self.heads):
            found = [f"{shortened(self.keys[key])} {given[number, key]:.2f}" for key in strongest(given[number], 4)]
            lines.append(f"head {head:>2}  → {',  '.join(found)}"[:79])
        return "\n".join([self.title, *lines])

    def _shown(self) -> tuple[list[int], list[int]]:
        """The queries and the keys that are drawn: all, or of a long text those around the word, and the strongest."""
        left, right = list(range(len(self.queries))), list(range(len(self.keys)))
        if len(left) > MOST_LABELS:
            left = [place for place in left if min(abs(place - each) for each in self.chosen) <= 15]
        if len(right) > MOST_LABELS:
            most = self.weights.max(axis=(0, 1))
            right = sorted(np.argsort(-most, kind="stable")[: MOST_LABELS - 20].tolist())
        return left, right


def grid(parts: Sequence[KindMaps], title: str) -> Figure:
    """All heads as small heat maps: layers in rows, heads in columns, one part below the other for each kind."""
    mosaics = [_mosaic(part.weights) for part in parts]
    sizes = [_grid_inches(part.weights) for part in parts]
    width = max(width for width, _ in sizes) + 1.0
    figure = new_figure(max(width, 3.2), sum(height for _, height in sizes) + 0.75 * len(parts) + 0.3)
    figure.suptitle(title, parse_math=False, fontsize=11)
    ratios = [height for _, height in sizes]
    rows: Any = figure.subplots(len(parts), 1, squeeze=False, height_ratios=ratios)
    shades = SHADES.with_extremes(bad="#b9b9b9")
    for axes, part, (mosaic, pitch) in zip(rows[:, 0], parts, mosaics, strict=True):
        layers, heads = part.weights.shape[:2]
        norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
        axes.imshow(mosaic, cmap=shades, norm=norm, interpolation="nearest", aspect="equal")
        axes.set_xticks([pitch[1] * (head + 0.5) for head in range(heads)], range(heads))
        axes.set_yticks([pitch[0] * (layer + 0.5) for layer in range(layers)], range(layers))
        axes.tick_params(length=0, labelsize=8)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel("head" if len(parts) == 1 else f"{NAMES[part.kind]}: head")
        axes.set_ylabel("layer")
        axes.spines[:].set_visible(False)
    return figure


def pooled(weights: Weights, most: int) -> tuple[Weights, int]:
    """(…, time, source time) with at most `most` rows and columns, each cell the largest of a block; and its size.

    Both sides have blocks of one size, so that a diagonal stays one. The mean would let a thin line fade.
    """
    size = -(-max(weights.shape[-2:]) // most)
    if size > 1:
        weights = _largest(_largest(weights, size).swapaxes(-1, -2), size).swapaxes(-1, -2)
    return weights, size


def _largest(weights: Weights, size: int) -> Weights:
    """The largest of each `size` rows, (…, time, source time)."""
    most = weights[..., ::size, :].copy()
    for first in range(1, size):
        rows = weights[..., first::size, :]
        part = most[..., : rows.shape[-2], :]
        np.maximum(part, rows, out=part)
    return most


def shortened(label: str, most: int = LONGEST_LABEL) -> str:
    """A token that is not too long for a label."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def strongest(weights: Weights, most: int = 3) -> list[int]:
    """The places of the largest weights (source time,), in their order; those without weight are left out."""
    found = np.argsort(-weights, kind="stable")[:most]
    return [int(place) for place in found if weights[place] > 0]


def drawn_lines(weights: Weights, shown: dict[int, int]) -> list[tuple[int, float]]:
    """The keys that get a line, with their weights (source time,)."""
    heaviest = float(weights.max())
    found = ((key, float(weights[key])) for key in shown)
    return [(key, weight) for key, weight in found if weight >= FAINTEST or weight == heaviest > 0]


def gaps(places: Sequence[int]) -> list[int]:
    """The rows after which some tokens are left out."""
    return [row for row in range(len(places) - 1) if places[row + 1] != places[row] + 1]


def head_colours(heads: int) -> list[tuple[float, float, float]]:
    """A colour for each head: hues around the circle, every other one darker, so that neighbours differ in print."""
    return [colorsys.hls_to_rgb((0.58 + n / max(heads, 1)) % 1, 0.34 if n % 2 else 0.46, 0.62) for n in range(heads)]


def _tokens(axis: Any, labels: Sequence[str], start: int, block: int) -> None:
    """Label an axis with tokens; where they are many, with some of them and their places."""
    count = len(labels)
    step = 1 if count <= MOST_LABELS else -(-count // 45 // block) * block
    places = range(0, count, step)
    names = [shortened(labels[place]) for place in places]
    if step > 1:
        names = [f"{place + start}: {name}" for name, place in zip(names, places, strict=True)]
    axis.set_ticks([place / block for place in places], names, parse_math=False, fontsize=8)
    axis.set_tick_params(length=0 if step == 1 else 2)


def _numbered(labels: Sequence[str], place: int) -> str:
    """A token's label; with its place where not all are shown."""
    return shortened(labels[place]) if len(labels) <= MOST_LABELS else f"{place}: {shortened(labels[place])}"


def _margin(labels: Sequence[str]) -> float:
    """Inches that the longest label takes."""
    return 0.25 + 0.085 * max(len(shortened(label)) + (5 if len(labels) > MOST_LABELS else 0) for label in labels)


def _grid_inches(weights: Weights) -> tuple[float, float]:
    """The size of a grid of all heads, (layers, heads, time, source time)."""
    layers, heads, queries, keys = weights.shape
    one = min(1.5, 10.0 / heads, 14.0 / layers) if layers * heads > 1 else 3.0
    longest = max(queries, keys)
    return heads * one * max(0.35, keys / longest), layers * one * max(0.35, queries / longest)


def _mosaic(weights: Weights) -> tuple[Weights, tuple[int, int]]:
    """All maps (layers, heads, time, source time) as one image with NaN between them, and the pitch of its cells."""
    layers, heads = weights.shape[:2]
    small, _ = pooled(weights, 96 if layers * heads <= 64 else 64)
    # small maps are enlarged, so that what separates them stays a thin line
    small = small.repeat(-(-40 // small.shape[2]), axis=2).repeat(-(-40 // small.shape[3]), axis=3)
    pitch = small.shape[2] + 3, small.shape[3] + 3
    image = np.full((layers * pitch[0] + 3, heads * pitch[1] + 3), np.nan, np.float32)
    for layer, head in np.ndindex(layers, heads):
        top, left = layer * pitch[0] + 3, head * pitch[1] + 3
        image[top : top + small.shape[2], left : left + small.shape[3]] = small[layer, head]
    return image, pitch
