"""Results of patching as maps and tables, and measures over a run's checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.errors import counted
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.heatmap import draw_cells, label_axis, label_inches
from weft.figures.picture import Picture, new_figure
from weft.figures.plot import Axis, Plot, lines
from weft.figures.shaded import drawable
from weft.figures.tables import Table, text_tables

LISTED = 10  # nodes, neurons and paths in a table
CELL_INCHES = 0.3

Array = NDArray[np.float64]


class PatchEffect(NamedTuple):
    """Share of the logit difference that a node or a path recovers, with a 95 % interval over the pairs."""

    name: str
    recovered: float
    low: float
    high: float


class SiteMap(NamedTuple):
    """Share recovered by one position of one layer, (layers, positions)."""

    kind: str
    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    recovered: Array


class AnswerAccuracy(NamedTuple):
    """Shares of pairs whose answer has a larger logit than the other one, and the largest of all tokens."""

    preferred: float
    likeliest: float


@dataclass(frozen=True)
class Circuit:
    """Nodes that suffice, and the accuracy on pairs that were not used to find them, by what is left of the model."""

    kept: tuple[str, ...]
    nodes: int
    pairs: int
    accuracies: Mapping[
        str, AnswerAccuracy
    ]  # "whole model", "circuit alone", "without the circuit", "without all nodes"

    @property
    def explained(self) -> float:
        """Share of the accuracy that remains with the circuit alone, by the likeliest token if the model finds it."""
        whole, alone = (self.accuracies[name] for name in ("whole model", "circuit alone"))
        by = "likeliest" if whole.likeliest >= whole.preferred / 2 else "preferred"
        return float(getattr(alone, by) / getattr(whole, by)) if getattr(whole, by) else math.nan


@dataclass(frozen=True, eq=False)
class Patching(Picture):
    """Shares of the logit difference that activations of the clean texts recover in the corrupt ones.

    `difference` are the logit differences of the two answers after the corrupt and after the clean texts.
    """

    pairs: int
    answers: tuple[str, str] | None  # of a single pair
    difference: tuple[float, float]
    maps: tuple[SiteMap, ...]
    nodes: tuple[PatchEffect, ...]
    neurons: tuple[PatchEffect, ...]
    paths: tuple[PatchEffect, ...]
    circuit: Circuit | None

    title = "Patching"
    about = TEXTS["patch"]
    module = "patch.js"

    def figure(self) -> Figure:
        """Return the maps below each other, layers upwards and positions from left to right."""
        heights = [0.5 + CELL_INCHES * len(each.layers) + label_inches(each.tokens) for each in self.maps]
        width = 1.6 + CELL_INCHES * max(8, *(len(each.tokens) for each in self.maps))
        figure = new_figure(width, sum(heights))
        grid: Any = figure.subplots(len(self.maps), 1, squeeze=False, height_ratios=heights)
        for axes, each in zip(grid[:, 0], self.maps, strict=True):
            image = draw_cells(axes, each.recovered)
            axes.invert_yaxis()
            for row, column in zip(*np.nonzero(each.recovered < -0.05), strict=True):
                axes.text(column, row, "–", ha="center", va="center", fontsize=7)
            label_axis(axes.xaxis, [drawable(token) for token in each.tokens])
            axes.set_yticks(range(len(each.layers)), each.layers, fontsize=8)
            axes.set_title(each.kind, fontsize=9)
            figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
        return figure

    def text(self) -> str:
        return text_tables(self.tables())

    def tables(self) -> list[Table]:
        """Return the strongest position of every site, nodes, neurons and paths by their effect, and the circuit."""
        rows = []
        for each in self.maps:
            layer, at = np.unravel_index(int(each.recovered.argmax()), each.recovered.shape)
            rows.append((each.kind, each.layers[layer], each.tokens[at], _percent(float(each.recovered.max()))))
        corrupt, clean = (f"{value:+.2f}".replace("-", "−") for value in self.difference)
        names = "" if self.answers is None else f" of {self.answers[0]} − {self.answers[1]}"
        over = "" if self.pairs == 1 else f", mean of {self.pairs} pairs"
        title = f"logit difference{names}: clean {clean}, corrupt {corrupt}{over}"
        place = "token" if self.answers else "position"
        found = [Table(("site", "layer", place, "recovered"), rows, title, text=(0, 1, 2))]
        for name, effects in (("node", self.nodes), ("neuron", self.neurons), ("path", self.paths)):
            if effects:
                listed = [(each.name, _percent(each.recovered), _interval(each)) for each in effects[:LISTED]]
                more = [f"… and {len(effects) - LISTED} more"] * (len(effects) > LISTED)
                found.append(Table((name, "recovered", "95% interval"), listed, remarks=more))
        return found if self.circuit is None else [*found, _circuit_table(self.circuit)]


def _circuit_table(circuit: Circuit) -> Table:
    rows = [(name, *map(_percent, accuracy)) for name, accuracy in circuit.accuracies.items()]
    size = f"{len(circuit.kept)} of {counted(circuit.nodes, 'node')}"
    title = f"circuit: {size}, {_percent(circuit.explained)} of the accuracy"
    kept = ", ".join(circuit.kept[:LISTED]) + (", …" if len(circuit.kept) > LISTED else "")
    remarks = [f"kept: {kept or 'none'}", f"on {counted(circuit.pairs, 'pair')} that were not used to find it"]
    return Table(("what is left", "answer preferred", "answer likeliest"), rows, title, remarks)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%".replace("-", "−")


def _interval(effect: PatchEffect) -> str:
    return "" if math.isnan(effect.low) else f"{_percent(effect.low)} … {_percent(effect.high)}"


@dataclass(frozen=True, eq=False)
class InterventionsOverTime(Charts):
    """Measures at each of a run's checkpoints, by name, beside the held-out loss, where it was measured."""

    title: str
    about: str
    steps: Sequence[int]
    measures: Mapping[str, Sequence[float]]
    loss: Mapping[int, float]

    def charts(self) -> list[Plot]:
        steps = Axis("step")
        shares = lines(self.title, self.measures, self.steps, x=steps, y=Axis(includes=(0.0, 1.0)))
        if not self.loss:
            return [shares]
        return [shares, lines("held-out loss", {"loss": list(self.loss.values())}, self.loss, x=steps, y=Axis("nats"))]

    def tables(self) -> list[Table]:
        rows = []
        for n, step in enumerate(self.steps):
            measured = sorted(self.loss, key=lambda each, step=step: abs(each - step))[:1]  # type: ignore[misc]
            values = [f"{each[n]:.3f}" for each in self.measures.values()]
            rows.append((f"{step:,}", *values, "".join(f"{self.loss[at]:.3f}" for at in measured)))
        return [Table(("step", *self.measures, "loss"), rows, self.title, text=())]

    def data(self) -> dict[str, Any]:
        return super().data() | {"steps": list(self.steps), "measures": dict(self.measures), "loss": dict(self.loss)}
