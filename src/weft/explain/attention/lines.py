"""Lines from a word to the tokens it attends to, one colour per head (Vaswani et al. 2017, figure 3)."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.figures.heatmap import MAX_LABELS, label_inches, shorten
from weft.figures.picture import Picture, new_figure

MIN_DRAWN = 0.02  # lines of a smaller probability are not drawn, except each head's strongest
MAX_CHOSEN_KEYS = 40  # keys drawn for a text of more than MAX_LABELS tokens
MAX_DISTANCE = 15  # queries drawn on either side of the word, for a text of more than MAX_LABELS tokens
LINES, SQUARE, GREY = 2.6, 0.16, "#666666"  # inches between the columns, and per square

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LineView(Picture):
    """Attention of the tokens `chosen`, in some heads of a layer: probabilities (heads, chosen, source time)."""

    title: str
    about: str
    probabilities: Probabilities
    heads: list[int]
    chosen: list[int]
    queries: list[str]
    keys: list[str]
    single: bool = False  # the model has one attention, without a head to name

    def figure(self) -> Figure:
        left, right = self._drawn_tokens()
        left_margin, right_margin = label_inches(self.queries), label_inches(self.keys)
        rows = max(len(left), len(right), 4)
        width = left_margin + LINES + right_margin + SQUARE * len(self.heads) + 0.4
        figure = new_figure(max(width, 4.6), 0.21 * rows + 0.9)
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        axes: Any = figure.add_subplot()
        axes.set(xlim=(-left_margin, width - left_margin), ylim=(rows - 0.2, -1.6))
        axes.axis("off")

        def write(x: float, row: float, text: str, **look: Any) -> None:
            axes.text(x, row, text, ha="right" if x < 0 else "left", va="center", size=9, parse_math=False, **look)

        left_row, right_row = ({token: row for row, token in enumerate(side)} for side in (left, right))
        for token, row in left_row.items():
            look = {"weight": "bold"} if token in self.chosen else {"color": GREY}
            write(-0.06, row, _numbered(self.queries, token), **look)
        for token, row in right_row.items():
            write(LINES + 0.06, row, _numbered(self.keys, token))
        for side, x in ((left, -0.06), (right, LINES + 0.06)):
            for row in gaps(side):
                write(x, row + 0.5, "⋯", color=GREY)
        # Hues around the circle, every other one darker, so that neighbouring heads differ in print.
        hues = [(0.58 + n / len(self.heads)) % 1 for n in range(len(self.heads))]
        colours = [colorsys.hls_to_rgb(hue, 0.34 if n % 2 else 0.46, 0.62) for n, hue in enumerate(hues)]
        for number, colour in enumerate(colours):
            # The lines of different heads end beside each other, so that none hides another.
            shift = 0.6 * ((number + 0.5) / len(colours) - 0.5)
            for order, query in enumerate(self.chosen):
                row = self.probabilities[number, order].tolist()
                least = min(MIN_DRAWN, max(row))
                for key, p in ((key, row[key]) for key in right_row if row[key] >= least > 0):
                    ends = [left_row[query] + shift, right_row[key] + shift]
                    axes.plot([0, LINES], ends, color=colour, lw=0.5 + 4 * p, alpha=0.25 + 0.75 * p)
        squares_x = LINES + 0.16 + right_margin
        if not self.single:
            axes.text(squares_x - 0.06, -0.9, "head", ha="right", va="center", size=9)
        alphas = np.sqrt(self.probabilities.mean(axis=1))
        for number, (head, colour) in enumerate(zip(self.heads, colours, strict=True)):
            x = squares_x + SQUARE * number
            if not self.single:
                axes.text(x + 0.07, -0.9, str(head), ha="center", va="center", size=9 if head < 10 else 7)
            for key, row in right_row.items():
                corners = [x, x + 0.14, x + 0.14, x], [row - 0.42, row - 0.42, row + 0.42, row + 0.42]
                axes.fill(*corners, facecolor=(*colour, float(alphas[number, key])), edgecolor="#cccccc", lw=0.3)
        return figure

    def text(self) -> str:
        means = self.probabilities.mean(axis=1)
        names = [""] if self.single else [f"head {head:>2}  " for head in self.heads]
        lines = (f"{name}→ {strongest(means[n], self.keys, 4)}"[:79] for n, name in enumerate(names))
        return "\n".join([self.title, *lines])

    def _drawn_tokens(self) -> tuple[list[int], list[int]]:
        """Return the queries and keys to draw: all or, for a long text, those near the word and the strongest keys."""
        left, right = list(range(len(self.queries))), list(range(len(self.keys)))
        if len(left) > MAX_LABELS:
            left = [token for token in left if min(abs(token - each) for each in self.chosen) <= MAX_DISTANCE]
        if len(right) > MAX_LABELS:
            right = sorted(np.argsort(-self.probabilities.max(axis=(0, 1)), kind="stable")[:MAX_CHOSEN_KEYS].tolist())
        return left, right


def strongest(probabilities: Probabilities, keys: Sequence[str], limit: int = 3) -> str:
    """Return the keys of the largest non-zero probabilities (source time,), with their values, as text."""
    indices = [i for i in np.argsort(-probabilities, kind="stable")[:limit] if probabilities[i] > 0]
    return ",  ".join(f"{shorten(keys[i])} {probabilities[i]:.2f}" for i in indices)


def gaps(tokens: Sequence[int]) -> list[int]:
    """Return the rows after which tokens are left out."""
    return [row for row in range(len(tokens) - 1) if tokens[row + 1] != tokens[row] + 1]


def _numbered(labels: Sequence[str], token: int) -> str:
    return shorten(labels[token]) if len(labels) <= MAX_LABELS else f"{token}: {shorten(labels[token])}"
