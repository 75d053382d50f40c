"""The confusion matrix of a classifier."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from weft.figures.picture import FIGURES, SHADES, Picture, new_figure

MOST_WRITTEN = 400  # cells that are still large enough for a number


@dataclass(frozen=True)
class ConfusionMatrix(Picture):
    """Counts (labels, labels) with actual labels in rows; the shade is the share of the row, the number the count."""

    counts: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    title: str = ""
    about: str = "Rows are the actual labels, columns the predicted ones; the shade is the share of the row."
    suffixes: ClassVar[tuple[str, ...]] = FIGURES

    def figure(self) -> Figure:
        """With a number in each cell where these have space."""
        counts, labels = np.asarray(self.counts, dtype=np.int64), self.labels
        totals = counts.sum(axis=-1, keepdims=True)
        shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
        inches = min(24.0, 1.8 + 0.45 * len(labels) + 0.05 * min(40, max(map(len, labels))))
        figure = new_figure(inches, inches)
        axes: Any = figure.add_subplot()
        image = axes.imshow(shares, cmap=SHADES, vmin=0.0, vmax=1.0, aspect="equal")
        # a label may hold a dollar sign, which begins no formula
        tilted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels)) > 3 else {}
        axes.set_xticks(range(len(labels)), labels, parse_math=False, **tilted)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("actual")
        axes.set_title(self.title, parse_math=False)
        if counts.size > MOST_WRITTEN:
            figure.colorbar(image, shrink=0.8)
            return figure
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.55 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=9)
        return figure
