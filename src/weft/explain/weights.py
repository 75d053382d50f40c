"""The numbers inside a model: its weights by group, and, with a text, what its layers compute.

What passes is summed up as it passes, place by place; nothing but the sums is kept.
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
from weft.explain.groups import grouped
from weft.explain.reading import Reading
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Look, Plot, Series, lines, plain, whole_numbers
from weft.figures.tables import Table
from weft.models.base import LanguageModel, evaluating
from weft.nn.config import Plain

MIN_BINS, MAX_BINS = 12, 120
TAIL = 0.005  # of the numbers at either end are not drawn: a few of them are often hundreds of times larger
SAMPLED = 1 << 20  # numbers that are enough to know where the tails begin
STEPPED = ("recurrence", "encoder", "decoder")  # of recurrent models
WATCHED = (".residual", ".feedforward.hidden", "attention.probabilities", "cross.probabilities")
SATURATED = 0.99  # of what a sigmoid or tanh can reach
SHARES = ("zeros", "small", "saturated", "dead")


@dataclass(frozen=True)
class Histogram:
    """Numbers in a few words: how many of them lie in each of the bins between `edges`, and what is remarkable.

    `zeros` is the share that is exactly 0, `small` that of less than a hundredth of the deviation; `saturated` the
    share beyond ±0.99 of what tanh or sigmoid gave; `dead` the share of hidden units that are 0 on the whole text.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    numbers: int
    mean: float
    deviation: float
    largest: float
    zeros: float
    small: float
    saturated: float | None = None
    dead: float | None = None


@dataclass(frozen=True)
class Histograms(Charts):
    """`weights` by part and layer ("" around the layers); `activations` by place and layer; `entropy` of attention.

    Entropy is by place and layer, as a share of the largest that the places seen allow.
    """

    weights: dict[str, dict[str, Histogram]]
    activations: dict[str, dict[str, Histogram]]
    entropy: dict[str, dict[str, float]]

    title = "Weights and activations"
    about = TEXTS["weights"]

    def charts(self) -> list[Plot]:
        drawn = [_chart(f"weights: {part}", found) for part, found in self.weights.items()]
        drawn += [_chart(f"activations: {place}", found) for place, found in self.activations.items()]
        entropy = {name: list(found.values()) for name, found in self.entropy.items()}
        layers = max(map(len, entropy.values()), default=0)
        if layers > 1:
            x, y = whole_numbers("layer", layers), Axis("share of the largest possible", holds=(0.0, 1.0))
            drawn.append(lines("entropy of attention", entropy, range(layers), x, y))
        return drawn

    def tables(self) -> list[Table]:
        rows = []
        for part, layers in self.weights.items():
            ranges = []
            for what, form in (("deviation", plain), ("largest", plain), ("zeros", "{:.1%}".format)):
                values = [getattr(found, what) for found in layers.values()]
                ranges.append(" – ".join(dict.fromkeys(form(end) for end in (min(values), max(values)))))
            rows.append((part, str(len(layers)), *ranges))
        header = ("part", "layers", "deviation", "largest", "zeros")
        tables = [Table(header, rows, "Weights, from the least layer to the most")]
        for place, layers in self.activations.items():
            shares = [what for what in SHARES if any(getattr(found, what) is not None for found in layers.values())]
            lines = [
                (layer, plain(found.mean), plain(found.deviation), plain(found.largest),
                 *(f"{getattr(found, what):.1%}" for what in shares))
                for layer, found in layers.items()
            ]  # fmt: skip
            columns = ("layer", "mean", "deviation", "largest", *shares)
            tables.append(
                Table(columns, lines, f"Activations: {place}", [TEXTS["histograms"]] if len(tables) == 1 else ())
            )
        if self.entropy:
            numbers = dict.fromkeys(layer for found in self.entropy.values() for layer in found)
            entropies = [[found.get(layer, math.nan) for layer in numbers] for found in self.entropy.values()]
            written = [["" if math.isnan(share) else f"{share:.3f}" for share in column] for column in entropies]
            cells = list(zip(numbers, *written, strict=True))
            remark = "As a share of the largest possible: 1 looks everywhere alike, 0 at one token."
            tables.append(Table(("layer", *self.entropy), cells, "Entropy of attention", [remark]))
        return tables


def histograms(model: LanguageModel, reading: Reading | None = None) -> Histograms:
    """How a model's weights are distributed, and on a text its activations; nothing in the model is changed."""
    groups = grouped(model)
    if not groups:
        raise ModelError("an n-gram model has counts, not weights: there is nothing to draw")
    weights: dict[str, dict[str, Histogram]] = {}
    for group, members in groups.items():
        flat = torch.cat([weight.detach().flatten().float() for weight in members])
        weights.setdefault(group.part, {})[group.layer] = _histogram(flat)
    return Histograms(weights, *_passing(reading) if reading is not None else ({}, {}))


def _passing(reading: Reading) -> tuple[dict[str, dict[str, Histogram]], dict[str, dict[str, float]]]:
    """What passes through a model's layers on a text, summed up as it passes: activations, and entropies."""
    model = reading.model
    inner: Any = getattr(model.config, "feedforward", None)
    bounded = isinstance(inner, Plain) and inner.activation in ("sigmoid", "tanh")
    activations: dict[str, dict[str, Histogram]] = {}
    entropy: dict[str, dict[str, float]] = {}
    steps: dict[str, list[Tensor]] = {}  # a recurrent decoder passes step by step

    def note(name: str, x: Tensor) -> None:
        where, _, what = name.rpartition(".")
        stack, _, layer = where.partition(".")
        if what == "probabilities":
            layer, _, kind = layer.rpartition(".")
            place = f"{stack} {kind}".strip() if kind else "attention"
            entropy.setdefault(place, {})[layer or "0"] = _entropy(x)
            return
        place = {"residual": f"{stack} residual", "hidden": f"{stack} feed-forward hidden"}.get(what, f"{name} states")
        found = _histogram(x.flatten().float())
        if what == "hidden":
            found = replace(found, dead=float((x == 0).flatten(0, -2).all(0).float().mean()))
        if name in STEPPED or (what == "hidden" and bounded):
            found = replace(found, saturated=float((x.abs() > SATURATED).float().mean()))
        activations.setdefault(place, {})[layer.removesuffix(".feedforward") or "all"] = found

    def watch(name: str, x: Tensor) -> Tensor:
        if name in STEPPED:
            steps.setdefault(name, []).append(x.detach().float())
        else:
            note(name, x.detach())
        return x

    watched = {
        name: partial(watch, name)
        for name, tap in taps(model).items()
        if (isinstance(tap.module, nn.RNNBase) if name in STEPPED else name.endswith(WATCHED))
    }
    with evaluating(model), torch.no_grad(), capture(model, replace=watched):
        model(reading.tokens, **reading.given)
    for name, parts in steps.items():
        note(name, torch.cat(parts, dim=1))
    return activations, entropy


def _histogram(values: Tensor) -> Histogram:
    values = values.cpu()
    mean = float(values.mean())
    deviation = float(values.std(unbiased=False)) if len(values) > 1 else 0.0
    sample = values[:: -(-len(values) // SAMPLED)].sort().values
    low, high = (float(sample[round(share * (len(sample) - 1))]) for share in (TAIL, 1 - TAIL))
    space = 0.2 * (high - low) or 1.0
    low, high = low - space, high + space
    bins = min(MAX_BINS, max(MIN_BINS, math.isqrt(len(values)) // 2))  # few numbers in many bins are noise
    counts = torch.histc(values, bins, low, high).numpy().astype(np.int64)
    largest = float(values.abs().max())
    zeros, small = (float(share.float().mean()) for share in (values == 0, values.abs() < 0.01 * deviation))
    return Histogram(counts, np.linspace(low, high, bins + 1), len(values), mean, deviation, largest, zeros, small)


def _entropy(probabilities: Tensor) -> float:
    """The mean entropy of rows (…, source time), each over the logarithm of how many places it sees."""
    rows = probabilities.double().flatten(0, -2)
    entropy, seen = -(rows * rows.clamp(min=1e-300).log()).sum(-1), (rows > 0).sum(-1)
    some = seen > 1
    return float((entropy[some] / seen[some].double().log()).mean()) if bool(some.any()) else math.nan


def _chart(title: str, layers: dict[str, Histogram]) -> Plot:
    """A line a layer; each is scaled to its own peak, for some are far narrower than others."""
    low, high = (1.3 * float(np.median([found.edges[end] for found in layers.values()])) for end in (0, -1))
    series = []
    for number, found in enumerate(layers.values()):
        shade = 35 + 65 * number / (len(layers) - 1) if len(layers) > 1 else 85
        heights = found.counts / max(1, found.counts.max())
        places = zip((found.edges[:-1] + found.edges[1:]) / 2, heights, strict=True)
        points = [(float(x), float(y)) for x, y in places if low <= x <= high]
        series.append(Series(points=points, look=Look(f"{shade:.0f}%", width=1.3)))
    return Plot(title, series, Axis("value"), Axis("share of the peak", holds=(0.0, 1.0)))
