"""Figures for a page or a paper, as PNG or SVG: the confusion matrix of a classifier."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from weft.errors import ConfigError, DataError
from weft.files import check_place, write_bytes

MOST_WRITTEN = 400  # cells that are still large enough for a number
SUFFIXES = (".png", ".svg")


def confusion_matrix(matrix: ArrayLike, labels: Sequence[str], title: str = "") -> Figure:
    """Counts (labels, labels) with true labels in rows; the shade is the share of the row, the number the count."""
    counts = np.asarray(matrix, dtype=np.int64)
    totals = counts.sum(axis=-1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    inches = min(24.0, 1.8 + 0.45 * len(labels) + 0.05 * min(40, max(map(len, labels))))
    figure = Figure(figsize=(inches, inches), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    # a label may hold a dollar sign, which begins no formula
    tilted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels)) > 3 else {}
    axes.set_xticks(range(len(labels)), labels, parse_math=False, **tilted)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title, parse_math=False)
    if counts.size > MOST_WRITTEN:
        figure.colorbar(image, shrink=0.8)
        return figure
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if shares[row, column] > 0.55 else "black"
        axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=9)
    return figure


def check_figure(path: Path) -> None:
    """Refuse a path where no figure can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a figure is written as {' or '.join(SUFFIXES)}")
    check_place(path)


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write a figure in the format of its suffix, atomically. The same figure gives the same bytes."""
    path = Path(path)
    check_figure(path)
    drawn = io.BytesIO()
    dated = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):
        figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150, metadata=dated)
    try:
        write_bytes(path, drawn.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
    return path
