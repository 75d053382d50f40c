"""Heat maps: shaded cells with labels on two sides, grids of small maps, and a confusion matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.figures.picture import FIGURES, SHADES, Picture, new_figure

MAX_LABELS = 60  # tokens that are all labelled; of more, every n-th is
MAX_ANNOTATED_CELLS = 400  # cells of a confusion matrix that are large enough for a number
DARK = 0.55  # a darker shade has white text
SHADE_STEPS = 20  # shades of a small map on a page

Values = TypeVar("Values", bound=NDArray[Any])


def max_pool(values: Values, max_cells: int) -> tuple[Values, int]:
    """Return (…, rows, columns) max-pooled in square blocks to at most `max_cells` a side, and the size of a block."""
    size = -(-max(values.shape[-2:]) // max_cells)
    if size > 1:  # the mean would let a thin line fade
        for axis in (-2, -1):
            starts = np.arange(0, values.shape[axis], size)
            values = np.maximum.reduceat(values, starts, axis=axis)  # type: ignore[assignment]
    return values, size


def shorten(label: str, max_characters: int = 14) -> str:
    """Return a label of at most `max_characters`, with an ellipsis if it was cut."""
    return label if len(label) <= max_characters else f"{label[: max_characters - 1]}…"


def label_inches(labels: Sequence[str]) -> float:
    """Return the margin that the longest label takes."""
    return 0.25 + 0.085 * (max(map(len, map(shorten, labels))) + (5 if len(labels) > MAX_LABELS else 0))


def label_axis(axis: Any, labels: Sequence[str], start: int = 0, *, block: int = 1) -> None:
    """Label an axis with tokens; of many tokens, with every n-th and its position, counted from `start`."""
    step = 1 if len(labels) <= MAX_LABELS else -(-len(labels) // 45 // block) * block
    positions = range(0, len(labels), step)
    names = [f"{position + start}: " * (step > 1) + shorten(labels[position]) for position in positions]
    axis.set_ticks([position / block for position in positions], names, parse_math=False, fontsize=9)
    axis.set_tick_params(length=0 if step == 1 else 2)
    for label in axis.get_ticklabels() if axis.axis_name == "x" else ():
        label.set_rotation(90 if len(label.get_text()) > 1 else 0)


def draw_cells(axes: Any, values: NDArray[Any], norm: Any = None) -> Any:
    """Draw shaded cells and return their image; without a `norm`, shades go from 0 to 1."""
    return axes.imshow(values, cmap=SHADES, norm=norm or Normalize(0.0, 1.0), interpolation="nearest")


def annotate_cells(axes: Any, image: Any, text: Callable[[int, int], str], *, size: float) -> None:
    """Write a text into every cell of an image, in white on dark shades."""
    for (row, column), value in np.ndenumerate(image.get_array()):
        color = "white" if image.norm(value) > DARK else "black"
        axes.text(column, row, text(row, column), ha="center", va="center", color=color, fontsize=size)


@dataclass(frozen=True)
class SmallMap:
    """Values (layers, heads), shaded from 0 to `top`; the cell of a NaN is empty."""

    title: str
    values: NDArray[np.float64]
    top: float
    unit: str = ""

    @property
    def largest(self) -> str:
        """Maximum, with its unit, layer and head."""
        row, column = np.unravel_index(int(np.nanargmax(self.values)), self.values.shape)
        return f"{f'{self.values[row, column]:.2f} {self.unit}'.strip()} in layer {row}, head {column}"

    def shades(self) -> Iterator[tuple[int, str]]:
        """Yield each shade in percent, with its cells as one SVG path of unit squares."""
        steps = np.rint(np.clip(np.nan_to_num(self.values) / self.top, 0, 1) * SHADE_STEPS).astype(int)
        for step in range(1, SHADE_STEPS + 1):
            cells = "".join(f"M{column} {row}h1v1h-1z" for row, column in np.argwhere(steps == step))
            if cells:
                yield 100 * step // SHADE_STEPS, cells

    def draw(self, axes: Any) -> None:
        """Draw for print; negative values have a dash."""
        rows, columns = self.values.shape
        image = draw_cells(axes, self.values, Normalize(0.0, self.top))
        axes.set_title(self.title + (f" ({self.unit})" if self.unit else ""), fontsize=8)
        numbered = self.values.size > 1
        axes.set_xticks(range(0, columns, -(-columns // 6)) if numbered else ())
        axes.set_yticks(range(0, rows, -(-rows // 8)) if numbered else ())
        axes.tick_params(labelsize=6, length=0, pad=1)
        for row, column in zip(*np.nonzero(self.values < -0.05 * self.top), strict=True):
            axes.text(column, row, "–", ha="center", va="center", fontsize=6)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.03)
        bar.ax.tick_params(labelsize=6, length=1, pad=1)
        bar.outline.set_linewidth(0.4)


def small_multiples(rows: Sequence[Sequence[SmallMap | None]], title: str) -> Figure:
    """Draw rows of small maps, all of one length; maps of a row have one shape. Wide rows are split into two lines."""
    shapes = [next(small.values.shape for small in row if small is not None) for row in rows]
    widest = max(columns for _, columns in shapes)
    heights = [0.75 + max(0.5, min(0.17, 6.0 / layers) * layers) for layers, _ in shapes]
    width = 0.75 + max(0.9, min(0.17, 3.0 / widest) * widest)
    count = len(rows[0])
    per_line = count if count * width < 12 else -(-count // 2)
    lines = -(-count // per_line)
    figure = new_figure(max(4.0, per_line * width + 0.3), lines * sum(heights) + 0.5)
    figure.suptitle(title, parse_math=False, fontsize=11)
    grid: Any = figure.subplots(lines * len(rows), per_line, squeeze=False, height_ratios=heights * lines)
    for (grid_row, grid_column), axes in np.ndenumerate(grid):
        line, row = divmod(grid_row, len(rows))
        index = line * per_line + grid_column
        small = rows[row][index] if index < count else None
        if small is None:
            axes.axis("off")
        else:
            small.draw(axes)
    return figure


@dataclass(frozen=True)
class ConfusionMatrix(Picture):
    """Counts (labels, labels), actual labels in rows; a cell shows its count and is shaded by its share of the row."""

    counts: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    title: str = ""
    about: str = "Rows are the actual labels, columns the predicted ones; the shade is the share of the row."
    suffixes: ClassVar[tuple[str, ...]] = FIGURES

    def figure(self) -> Figure:
        counts, labels = np.asarray(self.counts, dtype=np.int64), self.labels
        totals = counts.sum(axis=-1, keepdims=True)
        shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
        inches = min(24.0, 1.8 + 0.45 * len(labels) + 0.05 * min(40, max(map(len, labels))))
        figure = new_figure(inches, inches)
        axes: Any = figure.add_subplot()
        image = draw_cells(axes, shares)
        tilted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels)) > 3 else {}
        axes.set_xticks(range(len(labels)), labels, parse_math=False, **tilted)  # a dollar sign starts no formula
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="predicted", ylabel="actual")
        axes.set_title(self.title, parse_math=False)
        if counts.size > MAX_ANNOTATED_CELLS:
            figure.colorbar(image, shrink=0.8)
        else:
            annotate_cells(axes, image, lambda row, column: f"{counts[row, column]:,}", size=9)
        return figure
