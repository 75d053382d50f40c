"""A small network drawn as neurons: a circle per unit, a line per weight (lecture 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray

from weft.errors import ModelError
from weft.explain.graph.picture import HIDDEN, INPUTS, OUTPUTS
from weft.explain.reading import pieces
from weft.explain.texts import TEXTS
from weft.figures.page import as_json
from weft.figures.picture import COLOURS, Picture, new_figure
from weft.figures.shaded import WHITE
from weft.figures.tables import Table, text_tables
from weft.models.base import LanguageModel
from weft.models.recurrent import Recurrent
from weft.text.tokenizer import Tokenizer

MAX_UNITS = 12  # of a column; of more, the first are drawn, then "⋮" and the last two
RADIUS, GAP = 0.34, 1.0  # of a circle, between two layers of one column
MIN_COLUMN = 4.2  # distance of two columns, or half of the height if that is more
MAX_WIDTH, MIN_WIDTH = 3.6, 0.15  # of a line, in points
INCHES = 0.56  # per unit
OTHERS = "neurons: drawn for mlp and for Elman networks of one layer; --only graph draws every model"
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class UnitLayer(NamedTuple):
    """Layer of units: its symbol, what it computes, its column, and the labels of its units if they have any."""

    symbol: str
    about: str
    size: int
    column: int
    labels: Sequence[str] = ()


class UnitWeights(NamedTuple):
    """Weights (to, from) between two layers, given by their index."""

    name: str
    source: int
    target: int
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Neurons(Picture):
    """Network as layers of units and the weights between them."""

    layers: list[UnitLayer]
    weights: list[UnitWeights]

    title = "The network as neurons"
    about = TEXTS["neurons"]

    def text(self) -> str:
        layers = [(layer.symbol, f"{layer.size:,}", layer.about) for layer in self.layers]
        rows = []
        for name, source, target, values in self.weights:
            between = f"{self.layers[source].symbol} → {self.layers[target].symbol}"
            shape = " × ".join(f"{size:,}" for size in values.shape)
            rows.append((name, between, shape, f"{values.min():.3f}", f"{values.max():.3f}"))
        header = ("weights", "between", "shape", "smallest", "largest")
        tables = (Table(("layer", "units", "computes"), layers, text=(0, 2)), Table(header, rows, text=(0, 1)))
        return text_tables(tables)

    def data(self) -> dict[str, Any]:
        drawn = [[unit for unit in place if unit >= 0] for place in self._places()]
        layers = [
            layer._asdict() | {"labels": [layer.labels[unit] for unit in units if layer.labels], "drawn": units}
            for layer, units in zip(self.layers, drawn, strict=True)
        ]
        kept = [each.values[np.ix_(drawn[each.target], drawn[each.source])] for each in self.weights]
        weights = [each._asdict() | {"values": values} for each, values in zip(self.weights, kept, strict=True)]
        return as_json({"layers": layers, "weights": weights})

    def _places(self) -> list[dict[int, float]]:
        """Return the height of each drawn unit, by layer; −1 is the mark of units left out."""
        places: list[dict[int, float]] = [{} for _ in self.layers]
        for column in {layer.column for layer in self.layers}:
            inside = [index for index, layer in enumerate(self.layers) if layer.column == column]
            most, y = MAX_UNITS // len(inside), GAP
            for index in inside:
                y, size = y - GAP, self.layers[index].size
                units = [*range(size)] if size <= most else [*range(most - 3), -1, size - 2, size - 1]
                for unit in units:
                    places[index][unit] = y
                    y -= 1.0
            for index in inside:
                places[index] = {unit: height - (y + 1.0) / 2 for unit, height in places[index].items()}
        return places

    def figure(self) -> Figure:
        places = self._places()
        ys = [y for place in places for y in place.values()]
        pitch, last = max(MIN_COLUMN, (max(ys) - min(ys)) / 2), max(layer.column for layer in self.layers)
        limits = (-2.0, pitch * last + 2.0), (min(ys) - 0.9, max(ys) + 1.3)
        figure = new_figure(*((high - low) * INCHES for low, high in limits))
        axes: Any = figure.add_subplot()
        axes.set(xlim=limits[0], ylim=limits[1], aspect="equal")
        axes.axis("off")
        for each in self.weights:
            self._draw_weights(axes, each, places, pitch=pitch)
        for index, (layer, place) in enumerate(zip(self.layers, places, strict=True)):
            x, below = pitch * layer.column, any(other.column == layer.column for other in self.layers[:index])
            axes.text(x, (max(place.values()) if below else max(ys)) + 0.55, layer.about, ha="center", fontsize=9)
            for unit, y in place.items():
                if unit < 0:
                    axes.text(x, y, "⋮", ha="center", va="center", fontsize=13)
                    continue
                axes.add_patch(Circle((x, y), RADIUS, facecolor="none", edgecolor="#000000", linewidth=1.0))
                name = f"{layer.symbol}{str(unit).translate(SUBSCRIPTS)}"
                axes.text(x, y, name, ha="center", va="center", fontsize=9 if len(name) < 4 else 7)
                if layer.labels:
                    at: dict[str, Any] = {"va": "center", "fontsize": 9, "parse_math": False}
                    axes.text(x + RADIUS + 0.14, y, layer.labels[unit], **at)
        return figure

    def _draw_weights(self, axes: Any, weights: UnitWeights, places: list[dict[int, float]], *, pitch: float) -> None:
        source, target = places[weights.source], places[weights.target]
        x, to_x = (pitch * self.layers[end].column for end in (weights.source, weights.target))
        largest = float(np.abs(weights.values).max()) or 1.0
        widest = MAX_WIDTH * min(1.0, 6 / max(len(source), len(target)))
        for (unit, y), (to, to_y) in product(source.items(), target.items()):
            if min(unit, to) >= 0:
                value = weights.values[to, unit]
                dx, dy = RADIUS * np.array([to_x - x, to_y - y]) / np.hypot(to_x - x, to_y - y)
                look = {"color": COLOURS[int(value < 0)], "linewidth": max(MIN_WIDTH, widest * abs(value) / largest)}
                axes.plot((x + dx, to_x - dx), (y + dy, to_y - dy), alpha=0.8, zorder=0, **look)
        above = np.mean([*source.values()]) > np.mean([*target.values()]) + 0.01
        ends = [max(place.values()) if above else min(place.values()) for place in (source, target)]
        axes.text((x + to_x) / 2, sum(ends) / 2 + (0.4 if above else -0.65), weights.name, ha="center", fontsize=10)


def lecture_neurons() -> Neurons:
    """Return the lectures' network with one hidden layer as neurons, with random weights."""
    draw = np.random.default_rng(0)
    layers = [UnitLayer("x", "features x", INPUTS, 0), UnitLayer("z", "z = σ(αx)", HIDDEN, 1)]
    layers.append(UnitLayer("ŷ", "ŷ = softmax(βz)", OUTPUTS, 2))
    shapes = (("α", 0, (HIDDEN, INPUTS)), ("β", 1, (OUTPUTS, HIDDEN)))
    return Neurons(layers, [UnitWeights(name, n, n + 1, draw.normal(size=shape)) for name, n, shape in shapes])


def neurons(model: LanguageModel, tokenizer: Tokenizer | None = None) -> Neurons:
    """Return one step of an Elman network as neurons; its outputs are labelled with the tokenizer's tokens."""
    if not isinstance(model, Recurrent) or model.config.cell != "elman" or model.config.layers > 1:
        raise ModelError(OTHERS)
    named = [] if tokenizer is None else pieces(tokenizer, range(tokenizer.vocab_size))
    tokens = [piece.removeprefix(WHITE[" "]) or piece for piece in named]
    output = model.embedding.weight if model.output is None else model.output
    tensors = (*model.recurrence.all_weights[0][:2], output)
    w_ax, w_ah, w_y = (each.detach().double().cpu().numpy() for each in tensors)
    layers = [
        UnitLayer("x", "xₜ", w_ax.shape[1], 0),
        UnitLayer("h", "hₜ₋₁", w_ah.shape[1], 0),
        UnitLayer("h", "hₜ = tanh(W_ax xₜ + W_ah hₜ₋₁ + b)", len(w_ah), 1),
        UnitLayer("y", "yₜ = softmax(W_yh hₜ + b)", len(w_y), 2, tokens),
    ]
    weights = (UnitWeights("W_ax", 0, 2, w_ax), UnitWeights("W_ah", 1, 2, w_ah), UnitWeights("W_yh", 2, 3, w_y))
    return Neurons(layers, list(weights))
