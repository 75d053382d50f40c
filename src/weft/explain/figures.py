"""Figures for a page or a paper, as PNG or SVG: a heat map, and the confusion matrix of a classifier."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from weft.errors import ConfigError, DataError
from weft.files import check_place, write_bytes

MOST_WRITTEN = 400  # cells that are still large enough for their number
SUFFIXES = (".png", ".svg")


class Axis(NamedTuple):
    """One side of a heat map: what stands at each row or column, and what they are together."""

    labels: Sequence[str]
    name: str = ""


def heat_map(
    values: ArrayLike,
    rows: Axis,
    columns: Axis,
    limits: tuple[float, float] | None = None,
    texts: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """Values (rows, columns) as shades, darkest at the upper limit; `texts` are written into the cells if they fit."""
    grid = np.asarray(values, dtype=np.float64)
    down, across = rows.labels, columns.labels
    if grid.shape != (len(down), len(across)) or not grid.size:
        raise DataError(f"a heat map of {grid.shape} values, but {len(down)} rows and {len(across)} columns have names")
    figure = Figure(figsize=(_inches(len(across), down), _inches(len(down), across)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    low, high = limits or (None, None)
    image = axes.imshow(grid, cmap="Blues", vmin=low, vmax=high, aspect="equal")
    # a token may hold a dollar sign, which is no formula
    tilted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, across)) > 3 else {}
    axes.set_xticks(range(len(across)), across, parse_math=False, **tilted)
    axes.set_yticks(range(len(down)), down, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(columns.name)
    axes.set_ylabel(rows.name)
    if texts is not None and grid.size <= MOST_WRITTEN:
        for (row, column), value in np.ndenumerate(grid):
            color = "white" if image.norm(value) > 0.55 else "black"
            axes.text(column, row, texts[row][column], ha="center", va="center", color=color, fontsize=9)
    else:
        figure.colorbar(image, shrink=0.8)
    return figure


def confusion_matrix(matrix: ArrayLike, labels: Sequence[str], title: str = "") -> Figure:
    """Counts (labels, labels) with true labels in rows; the shade is the share of the row, the number the count."""
    counts = np.asarray(matrix, dtype=np.int64)
    totals = counts.sum(axis=-1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    texts = [[f"{count:,}" for count in row] for row in counts.tolist()]
    figure = heat_map(shares, Axis(labels, "true"), Axis(labels, "predicted"), (0.0, 1.0), texts)
    figure.axes[0].set_title(title, parse_math=False)
    return figure


def _inches(cells: int, across: Sequence[str]) -> float:
    """The width of so many cells and, beside them, of the longest name of the other side."""
    return min(24.0, 1.8 + 0.45 * cells + 0.05 * min(40, max(map(len, across))))


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
