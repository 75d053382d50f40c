"""Distributions of a model's weights by group and, with a text, of its activations.

Activations are summarised as they are computed; only the summaries are kept.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.errors import ModelError
from weft.explain.capture import capture, taps
from weft.explain.groups import parameter_groups
from weft.explain.reading import Reading
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.formats import table_number
from weft.figures.plot import Axis, Look, Plot, Series, integer_axis, lines
from weft.figures.tables import Table
from weft.models.base import LanguageModel, evaluating
from weft.nn.config import Plain

MIN_BINS, MAX_BINS = 12, 120
TAIL = 0.005  # share of the values at either end that is not drawn: outliers are often hundreds of times larger
MAX_SAMPLES = 1 << 20  # values used to find the tails
RECURRENT = ("recurrence", "encoder", "decoder")  # stacks of recurrent models, whose states are collected step by step
WATCHED = (".residual", ".feedforward.hidden", "attention.probabilities", "cross.probabilities")
SATURATED = 0.99  # of the largest output of sigmoid or tanh
SHARES = ("zeros", "small", "saturated", "dead")


@dataclass(frozen=True)
class Histogram:
    """Counts of values in the bins between `edges`, and statistics of all `size` values."""

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    size: int
    mean: float
    deviation: float
    largest: float
    zeros: float  # share that is exactly 0
    small: float  # share below a hundredth of the standard deviation
    saturated: float | None = None  # share of sigmoid or tanh outputs beyond ±0.99
    dead: float | None = None  # share of hidden units that are 0 on the whole text


@dataclass(frozen=True)
class Histograms(Charts):
    """Distributions by part and layer, "" outside the layers."""

    weights: dict[str, dict[str, Histogram]]
    activations: dict[str, dict[str, Histogram]]
    entropy: dict[str, dict[str, float]]  # of attention, as a share of the maximum over the visible keys

    title = "Weights and activations"
    about = TEXTS["weights"]

    def charts(self) -> list[Plot]:
        charts = [_chart(f"weights: {part}", layers) for part, layers in self.weights.items()]
        charts += [_chart(f"activations: {name}", layers) for name, layers in self.activations.items()]
        entropy = {name: list(layers.values()) for name, layers in self.entropy.items()}
        layers = max(map(len, entropy.values()), default=0)
        if layers > 1:
            x, y = integer_axis("layer", layers), Axis("share of the maximum", includes=(0.0, 1.0))
            charts.append(lines("entropy of attention", entropy, range(layers), x=x, y=y))
        return charts

    def tables(self) -> list[Table]:
        rows = []
        for part, layers in self.weights.items():
            ranges = []
            for statistic, text in (("deviation", table_number), ("largest", table_number), ("zeros", "{:.1%}".format)):
                values = [getattr(histogram, statistic) for histogram in layers.values()]
                ranges.append(" – ".join(dict.fromkeys(text(end) for end in (min(values), max(values)))))
            rows.append((part, str(len(layers)), *ranges))
        tables = [Table(("part", "layers", "deviation", "largest", "zeros"), rows, "Weights, range over the layers")]
        for name, layers in self.activations.items():
            shares = [share for share in SHARES if any(getattr(each, share) is not None for each in layers.values())]
            cells = []
            for layer, each in layers.items():
                moments = map(table_number, (each.mean, each.deviation, each.largest))
                cells.append((layer, *moments, *(f"{getattr(each, share):.1%}" for share in shares)))
            columns, remarks = ("layer", "mean", "deviation", "largest", *shares), [TEXTS["histograms"]]
            tables.append(Table(columns, cells, f"Activations: {name}", remarks if len(tables) == 1 else ()))
        if self.entropy:
            numbers = dict.fromkeys(layer for by_layer in self.entropy.values() for layer in by_layer)
            entropies = [[by_layer.get(layer, math.nan) for layer in numbers] for by_layer in self.entropy.values()]
            texts = [["" if math.isnan(share) else f"{share:.3f}" for share in column] for column in entropies]
            remark = "As a share of the maximum: 1 is uniform attention, 0 attention to one token."
            rows = list(zip(numbers, *texts, strict=True))
            tables.append(Table(("layer", *self.entropy), rows, "Entropy of attention", [remark]))
        return tables


def histograms(model: LanguageModel, reading: Reading | None = None) -> Histograms:
    """Return the distributions of a model's weights and, on a text, of its activations; the model is not changed."""
    groups = parameter_groups(model)
    if not groups:
        raise ModelError("an n-gram model has counts, not weights: there is nothing to draw")
    weights: dict[str, dict[str, Histogram]] = {}
    for group, members in groups.items():
        values = torch.cat([weight.detach().flatten().float() for weight in members])
        weights.setdefault(group.part, {})[group.layer] = _histogram(values)
    return Histograms(weights, *_activations(reading) if reading is not None else ({}, {}))


def _activations(reading: Reading) -> tuple[dict[str, dict[str, Histogram]], dict[str, dict[str, float]]]:
    """Return the activations of a model's layers on a text, and the entropies of its attention."""
    model = reading.model
    inner: Any = getattr(model.config, "feedforward", None)
    bounded = isinstance(inner, Plain) and inner.activation in ("sigmoid", "tanh")
    activations: dict[str, dict[str, Histogram]] = {}
    entropy: dict[str, dict[str, float]] = {}
    steps: dict[str, list[Tensor]] = {}  # states of a recurrent decoder, one per step

    def summarise(name: str, x: Tensor) -> None:
        path, _, tap = name.rpartition(".")
        stack, _, layer = path.partition(".")
        if tap == "probabilities":
            layer, _, kind = layer.rpartition(".")
            label = f"{stack} {kind}".strip() if kind else "attention"
            entropy.setdefault(label, {})[layer or "0"] = _entropy(x)
            return
        label = {"residual": f"{stack} residual", "hidden": f"{stack} feed-forward hidden"}.get(tap, f"{name} states")
        histogram = _histogram(x.flatten().float())
        if tap == "hidden":
            histogram = replace(histogram, dead=float((x == 0).flatten(0, -2).all(0).float().mean()))
        if name in RECURRENT or (tap == "hidden" and bounded):
            histogram = replace(histogram, saturated=float((x.abs() > SATURATED).float().mean()))
        activations.setdefault(label, {})[layer.removesuffix(".feedforward") or "all"] = histogram

    def watch(name: str, x: Tensor) -> Tensor:
        if name in RECURRENT:
            steps.setdefault(name, []).append(x.detach().float())
        else:
            summarise(name, x.detach())
        return x

    modules = {name: tap.module for name, tap in taps(model).items() if name in RECURRENT or name.endswith(WATCHED)}
    names = [name for name, module in modules.items() if name not in RECURRENT or isinstance(module, nn.RNNBase)]
    with evaluating(model), torch.no_grad(), capture(model, replace={name: partial(watch, name) for name in names}):
        model(reading.tokens, **reading.model_kwargs)
    for name, states in steps.items():
        summarise(name, torch.cat(states, dim=1))
    return activations, entropy


def _histogram(values: Tensor) -> Histogram:
    values = values.cpu()
    deviation = float(values.std(unbiased=False)) if len(values) > 1 else 0.0
    sample = values[:: -(-len(values) // MAX_SAMPLES)].sort().values
    low, high = (float(sample[round(share * (len(sample) - 1))]) for share in (TAIL, 1 - TAIL))
    margin = 0.2 * (high - low) or 1.0
    low, high = low - margin, high + margin
    bins = min(MAX_BINS, max(MIN_BINS, math.isqrt(len(values)) // 2))  # few values in many bins are noise
    return Histogram(
        counts=torch.histc(values, bins, low, high).numpy().astype(np.int64),
        edges=np.linspace(low, high, bins + 1),
        size=len(values),
        mean=float(values.mean()),
        deviation=deviation,
        largest=float(values.abs().max()),
        zeros=float((values == 0).float().mean()),
        small=float((values.abs() < 0.01 * deviation).float().mean()),
    )


def _entropy(probabilities: Tensor) -> float:
    """Return the mean entropy of the rows (…, source time), each relative to that of uniform attention to its keys."""
    rows = probabilities.double().flatten(0, -2)
    entropy, keys = -(rows * rows.clamp(min=1e-300).log()).sum(-1), (rows > 0).sum(-1)
    several = keys > 1
    return float((entropy[several] / keys[several].double().log()).mean()) if bool(several.any()) else math.nan


def _chart(title: str, layers: dict[str, Histogram]) -> Plot:
    """Return one line per layer, each scaled to its peak because some distributions are far narrower than others."""
    low, high = (1.3 * float(np.median([histogram.edges[end] for histogram in layers.values()])) for end in (0, -1))
    series = []
    for number, histogram in enumerate(layers.values()):
        shade = 35 + 65 * number / (len(layers) - 1) if len(layers) > 1 else 85
        heights = histogram.counts / max(1, histogram.counts.max())
        centres = (histogram.edges[:-1] + histogram.edges[1:]) / 2
        points = [(float(x), float(y)) for x, y in zip(centres, heights, strict=True) if low <= x <= high]
        series.append(Series(points=points, look=Look(f"{shade:.0f}%", width=1.3)))
    return Plot(title, series, Axis("value"), Axis("share of the peak", includes=(0.0, 1.0)))
