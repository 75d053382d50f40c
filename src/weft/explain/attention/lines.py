"""The lines that follow a word: what it attends to, a colour for each head (Vaswani et al. 2017, figure 3)."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.figures.heatmap import MAX_LABELS, label_inches, shortened
from weft.figures.picture import Picture, new_figure

MIN_DRAWN = 0.02  # a line of less probability is not drawn, unless it is its head's heaviest
MAX_CHOSEN_KEYS = 40  # of a long text
NEAR = 15  # queries before and after the word, of a long text
LINES, SQUARE, GREY = 2.6, 0.16, "#666666"  # inches between the columns, and of a square

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LineView(Picture):
    """What the tokens `chosen` of a text attend to, in some heads of a layer: (heads, chosen, source time)."""

    title: str
    about: str
    probabilities: Probabilities
    heads: list[int]
    chosen: list[int]
    queries: list[str]
    keys: list[str]

    def figure(self) -> Figure:
        left, right = self._shown()
        before, after = label_inches(self.queries), label_inches(self.keys)
        rows = max(len(left), len(right), 4)
        width = before + LINES + after + SQUARE * len(self.heads) + 0.4
        figure = new_figure(max(width, 4.6), 0.21 * rows + 0.9)
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        axes: Any = figure.add_subplot()
        axes.set(xlim=(-before, width - before), ylim=(rows - 0.2, -1.6))
        axes.axis("off")
        at_left, at_right = ({place: row for row, place in enumerate(side)} for side in (left, right))
        for place, row in at_left.items():
            look = {"weight": "bold"} if place in self.chosen else {"color": GREY}
            _word(axes, -0.06, row, _numbered(self.queries, place), "right", **look)
        for place, row in at_right.items():
            _word(axes, LINES + 0.06, row, _numbered(self.keys, place), "left")
        for side, x, where in ((left, -0.06, "right"), (right, LINES + 0.06, "left")):
            for row in gaps(side):
                _word(axes, x, row + 0.5, "⋯", where, color=GREY)
        colours = head_colours(len(self.heads))
        for number, colour in enumerate(colours):
            # the lines of the heads end beside each other, so that none hides the next
            aside = 0.6 * ((number + 0.5) / len(colours) - 0.5)
            for order, query in enumerate(self.chosen):
                for key, share in drawn_lines(self.probabilities[number, order], at_right):
                    ends = [at_left[query] + aside, at_right[key] + aside]
                    axes.plot([0, LINES], ends, color=colour, lw=0.5 + 4 * share, alpha=0.25 + 0.75 * share)
        begin = LINES + 0.16 + after
        axes.text(begin - 0.06, -0.9, "head", ha="right", va="center", size=7)
        given = np.sqrt(self.probabilities.mean(axis=1))
        for number, (head, colour) in enumerate(zip(self.heads, colours, strict=True)):
            x = begin + SQUARE * number
            axes.text(x + 0.07, -0.9, str(head), ha="center", va="center", size=7 if head < 10 else 5.5)
            for key, row in at_right.items():
                corners = [x, x + 0.14, x + 0.14, x], [row - 0.42, row - 0.42, row + 0.42, row + 0.42]
                axes.fill(*corners, facecolor=(*colour, float(given[number, key])), edgecolor="#cccccc", lw=0.3)
        return figure

    def text(self) -> str:
        given = self.probabilities.mean(axis=1)
        lines = (f"head {head:>2}  → {strongest(given[n], self.keys, 4)}"[:79] for n, head in enumerate(self.heads))
        return "\n".join([self.title, *lines])

    def _shown(self) -> tuple[list[int], list[int]]:
        """The queries and the keys that are drawn: all, or of a long text those around the word, and the strongest."""
        left, right = list(range(len(self.queries))), list(range(len(self.keys)))
        if len(left) > MAX_LABELS:
            left = [place for place in left if min(abs(place - each) for each in self.chosen) <= NEAR]
        if len(right) > MAX_LABELS:
            most = self.probabilities.max(axis=(0, 1))
            right = sorted(np.argsort(-most, kind="stable")[:MAX_CHOSEN_KEYS].tolist())
        return left, right


def _word(axes: Any, x: float, row: float, text: str, side: str, **look: Any) -> None:
    axes.text(x, row, text, ha=side, va="center", size=9, parse_math=False, **look)


def strongest(given: Probabilities, keys: Sequence[str], most: int = 3) -> str:
    """The keys of the largest probabilities (source time,), with these; those that get nothing are left out."""
    found = [place for place in np.argsort(-given, kind="stable")[:most] if given[place] > 0]
    return ",  ".join(f"{shortened(keys[place])} {given[place]:.2f}" for place in found)


def drawn_lines(given: Probabilities, shown: dict[int, int]) -> list[tuple[int, float]]:
    """The keys that get a line, with their probabilities (source time,)."""
    heaviest, found = float(given.max()), ((key, float(given[key])) for key in shown)
    return [(key, share) for key, share in found if share >= MIN_DRAWN or share == heaviest > 0]


def gaps(places: Sequence[int]) -> list[int]:
    """The rows after which some tokens are left out."""
    return [row for row in range(len(places) - 1) if places[row + 1] != places[row] + 1]


def head_colours(heads: int) -> list[tuple[float, float, float]]:
    """A colour for each head: hues around the circle, every other one darker, so that neighbours differ in print."""
    return [colorsys.hls_to_rgb((0.58 + n / max(heads, 1)) % 1, 0.34 if n % 2 else 0.46, 0.62) for n in range(heads)]


def _numbered(labels: Sequence[str], place: int) -> str:
    return shortened(labels[place]) if len(labels) <= MAX_LABELS else f"{place}: {shortened(labels[place])}"
