"""Heat maps: cells whose shade tells a number, with labels along both sides; many small ones; a confusion matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.figures.picture import FIGURES, SHADES, Picture, new_figure

MAX_LABELS = 60  # tokens that each get a label; of more, every so many-th
MAX_LABEL_CHARACTERS = 14
MAX_WRITTEN_CELLS = 400  # of a confusion matrix: they are still large enough for a number
DARK = 0.55  # a shade that needs white letters
SHADE_STEPS = 20  # of small maps on a page

Values = TypeVar("Values", bound=NDArray[Any])


def pooled(values: Values, most: int) -> tuple[Values, int]:
    """(…, rows, columns) with at most `most` rows and columns, each cell the largest of a block; and its size.

    Both sides have blocks of one size, so that a diagonal stays one. The mean would let a thin line fade.
    """
    size = -(-max(values.shape[-2:]) // most)
    if size > 1:
        for axis in (-2, -1):
            starts = np.arange(0, values.shape[axis], size)
            values = np.maximum.reduceat(values, starts, axis=axis)  # type: ignore[assignment]
    return values, size


def shortened(label: str, most: int = MAX_LABEL_CHARACTERS) -> str:
    """A token that is not too long for a label."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def label_inches(labels: Sequence[str]) -> float:
    """The margin that the longest label takes."""
    return 0.25 + 0.085 * (max(map(len, map(shortened, labels))) + (5 if len(labels) > MAX_LABELS else 0))


def label_axis(axis: Any, labels: Sequence[str], start: int = 0, block: int = 1) -> None:
    """Label an axis with tokens; where they are many, with some of them and their places, counted from `start`."""
    step = 1 if len(labels) <= MAX_LABELS else -(-len(labels) // 45 // block) * block
    places = range(0, len(labels), step)
    names = [f"{place + start}: " * (step > 1) + shortened(labels[place]) for place in places]
    axis.set_ticks([place / block for place in places], names, parse_math=False, fontsize=8)
    axis.set_tick_params(length=0 if step == 1 else 2)


def shade_cells(axes: Any, values: NDArray[Any], norm: Any = None) -> Any:
    """Shaded cells, and what a colour bar needs; without a `norm` from 0 to 1."""
    return axes.imshow(values, cmap=SHADES, norm=norm or Normalize(0.0, 1.0), interpolation="nearest")


def write_cells(axes: Any, image: Any, text: Callable[[int, int], str], size: float) -> None:
    """A text in every cell of an image, white on dark shades."""
    for (row, column), value in np.ndenumerate(image.get_array()):
        color = "white" if image.norm(value) > DARK else "black"
        axes.text(column, row, text(row, column), ha="center", va="center", color=color, fontsize=size)


@dataclass(frozen=True)
class SmallMap:
    """Numbers (rows, columns), shaded from 0 to `top`; NaN where one means nothing, which leaves a cell empty."""

    title: str
    values: NDArray[np.float64]
    top: float
    unit: str = ""

    @property
    def largest(self) -> str:
        """The largest number and where it stands."""
        row, column = np.unravel_index(int(np.nanargmax(self.values)), self.values.shape)
        return f"{f'{self.values[row, column]:.2f} {self.unit}'.strip()} in layer {row}, head {column}"

    def shades(self) -> Iterator[tuple[int, str]]:
        """For a page: each shade in percent, and its cells as one path of unit squares."""
        steps = np.rint(np.clip(np.nan_to_num(self.values) / self.top, 0, 1) * SHADE_STEPS).astype(int)
        for step in range(1, SHADE_STEPS + 1):
            cells = "".join(f"M{column} {row}h1v1h-1z" for row, column in np.argwhere(steps == step))
            if cells:
                yield 100 * step // SHADE_STEPS, cells

    def draw(self, axes: Any) -> None:
        """For print; numbers below 0 are marked."""
        rows, columns = self.values.shape
        image = shade_cells(axes, self.values, Normalize(0.0, self.top))
        axes.set_title(self.title + (f" ({self.unit})" if self.unit else ""), fontsize=8)
        axes.set_xticks(range(0, columns, -(-columns // 6)))
        axes.set_yticks(range(0, rows, -(-rows // 8)))
        axes.tick_params(labelsize=6, length=0, pad=1)
        for row, column in zip(*np.nonzero(self.values < -0.05 * self.top), strict=True):
            axes.text(column, row, "–", ha="center", va="center", fontsize=6)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.03)
        bar.ax.tick_params(labelsize=6, length=1, pad=1)
        bar.outline.set_linewidth(0.4)


def small_maps(rows: Sequence[Sequence[SmallMap | None]], title: str) -> Figure:
    """Rows of small maps of one shape each, as many in all rows; those of a wide row in two lines."""
    shapes = [next(each.values.shape for each in row if each is not None) for row in rows]
    widest = max(columns for _, columns in shapes)
    tall = [0.75 + max(0.5, min(0.17, 6.0 / count) * count) for count, _ in shapes]
    wide = 0.75 + max(0.9, min(0.17, 3.0 / widest) * widest)
    count = len(rows[0])
    across = count if count * wide < 12 else -(-count // 2)
    lines = -(-count // across)
    figure = new_figure(max(4.0, across * wide + 0.3), lines * sum(tall) + 0.5)
    figure.suptitle(title, parse_math=False, fontsize=11)
    grid: Any = figure.subplots(lines * len(rows), across, squeeze=False, height_ratios=tall * lines)
    for place, axes in np.ndenumerate(grid):
        line, row = divmod(place[0], len(rows))
        which = line * across + place[1]
        chosen = rows[row][which] if which < count else None
        if chosen is None:
            axes.axis("off")
        else:
            chosen.draw(axes)
    return figure


@dataclass(frozen=True)
class ConfusionMatrix(Picture):
    """Counts (labels, labels) with actual labels in rows; the shade is the share of the row, the number the count."""

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
        image = shade_cells(axes, shares)
        # a label may hold a dollar sign, which begins no formula
        tilted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, labels)) > 3 else {}
        axes.set_xticks(range(len(labels)), labels, parse_math=False, **tilted)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="predicted", ylabel="actual")
        axes.set_title(self.title, parse_math=False)
        if counts.size > MAX_WRITTEN_CELLS:
            figure.colorbar(image, shrink=0.8)
        else:
            write_cells(axes, image, lambda row, column: f"{counts[row, column]:,}", 9)
        return figure
