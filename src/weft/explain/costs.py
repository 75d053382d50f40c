"""Cost of a model: parameters, operations and bytes, by component and by layer, from the settings alone.

`count` and `memory` do the counting. The cost of one layer is the difference between models that differ by one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from weft.config import Config
from weft.costs.count import Component, Count, count
from weft.costs.memory import Memory, Workload, activation_bytes, cache_bytes, narrow, training_memory
from weft.costs.units import byte_size, reach, short
from weft.errors import ModelError, counted
from weft.explain.texts import TEXTS
from weft.figures.page import as_json, html_tables, mount_point
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.tables import Table, text_tables
from weft.models import config

MIN_SHARE = 0.01  # smaller shares are drawn together as "other"
OTHER = "other"
OUTSIDE_LAYERS = "outside the layers"
HEADER = ("part", "parameters", "share", "forward", "training", "share", "bf16")


@dataclass(frozen=True)
class LayerCost:
    """`repeats` layers of equal cost: `cost` of each, and the bytes of its activations per token in bf16."""

    name: str
    repeats: int
    cost: Count
    activations: float


class BarSegment(NamedTuple):
    """Segment of a bar, with its `shade` in percent and a tooltip; only the first of equal ones has a `name`."""

    name: str
    label: str
    share: float
    shade: int
    tells: str = ""


class CostBar(NamedTuple):
    """Total and its composition."""

    title: str
    total: str
    pieces: list[BarSegment]


Shares = Sequence[tuple[str, float]]
Formatter = Callable[[float], str]


@dataclass(frozen=True)
class Costs(Picture):
    """Cost of a model for sequences of `cost.length` tokens; `around` is the cost outside the layers."""

    cost: Count
    layers: tuple[LayerCost, ...]
    around: Count
    memory: Memory  # of training on one sequence in bf16
    cache: int  # bytes per token in bf16

    scripts = ("costs.js",)
    title = "What it costs"
    about = TEXTS["costs"]

    def tables(self) -> list[Table]:
        cost = self.cost
        title = f"By component; FLOPs per token, at {cost.length:,} tokens per sequence"
        remarks = [*([cost.note] if cost.note else []), TEXTS["components"]]
        components = Table(HEADER, [*self._part_rows(cost), _row("all", cost, cost)], title, remarks)
        rows = []
        for layer in self.layers:
            name = f"{layer.repeats} × {layer.name}, each" if layer.repeats > 1 else layer.name
            parts = self._part_rows(layer.cost, "  ") if len(layer.cost.components) > 1 else []
            rows += [_row(name, layer.cost, cost), *parts]
        rows += [_row(OUTSIDE_LAYERS, self.around, cost), *self._part_rows(self.around, "  ")]
        return [components, Table(HEADER, rows, "By layer; FLOPs per token"), self._bytes()]

    def text(self) -> str:
        return text_tables(self.tables())

    def html(self) -> str:
        return mount_point("costs.js", self.data()) + html_tables(self.tables())

    def data(self) -> dict[str, Any]:
        """Return the data of web/costs.js."""
        return as_json({"bars": self.bars()})

    def figure(self) -> Figure:
        bars = self.bars()
        figure = new_figure(7.2, 1.02 * len(bars))
        for number, bar in enumerate(bars, 1):
            axes: Any = figure.add_subplot(len(bars), 1, number)
            left = 0.0
            for piece in bar.pieces:
                label = f"{piece.name} {piece.label}" if piece.name else None
                edge = {"edgecolor": "white", "linewidth": 0.8 if len(bar.pieces) < 40 else 0.2}
                axes.barh(0, piece.share, left=left, color=SHADES(piece.shade / 100), label=label, **edge)
                left += piece.share
            axes.set_xlim(0, 1)
            axes.axis("off")
            axes.set_title(f"{bar.title}: {bar.total}", loc="left", fontsize=9.5, pad=3)
            space = {"borderpad": 0.1, "handlelength": 1, "columnspacing": 1.4, "handletextpad": 0.5}
            axes.legend(loc="upper left", bbox_to_anchor=(0, 0.02), ncols=4, frameon=False, fontsize=9, **space)
        return figure

    def bars(self) -> list[CostBar]:
        """Return the shares of parameters, operations and bytes, as drawn."""
        cost, total, bytes_ = self.cost, self.cost.parameters, self.memory.total()
        flops = [(part.name, cost.share(part)) for part in cost.components]
        weights = [(part.name, part.parameters / total) for part in cost.components]
        names = ("weights", "copies", "gradients", "optimizer", "activations", "logits")
        labels = ("weights", "16-bit copies", *names[2:])
        memory = [(label, getattr(self.memory, name) / bytes_) for label, name in zip(labels, names, strict=True)]
        shades = _shades(weights, flops)  # a component has the same shade in both
        both_passes = f"{short(cost.forward)} forward, {short(cost.training())} in training"
        title = f"Bytes in training on one sequence of {cost.length:,} tokens"
        return [
            CostBar("Parameters", f"{total:,}", _pieces(weights, shades, lambda n: _count(n * total))),
            CostBar("FLOPs per token", both_passes, _pieces(flops, shades, lambda n: _flops(n * cost.training()))),
            self._layers_bar("Parameters by layer", lambda each: each.parameters, _count),
            self._layers_bar("FLOPs by layer", Count.training, _flops),
            CostBar(title, byte_size(bytes_), _pieces(memory, _shades(memory), lambda n: byte_size(n * bytes_))),
        ]

    def _layers_bar(self, title: str, measure: Callable[[Count], float], text: Formatter) -> CostBar:
        """Return a bar with one segment per layer; neighbours differ in shade, so that they can be counted."""
        pieces, inside, total = list[BarSegment](), 0.0, measure(self.cost)
        for layer in self.layers:
            cost, several = measure(layer.cost), layer.repeats > 1
            inside += layer.repeats * cost
            share = f"{cost / total:.1%}"
            for number in range(layer.repeats):
                name = "" if number else f"{layer.repeats} × {layer.name}" if several else layer.name
                tells = f"{f'{layer.name} {number}' if several else layer.name}: {text(cost)}, {share}"
                label, shade = f"{share} each" if several else share, 55 if number % 2 else 75
                pieces.append(BarSegment(name, label, cost / total, shade, tells))
        outside, share = total - inside, f"{(total - inside) / total:.1%}"
        tells = f"{OUTSIDE_LAYERS}: {text(outside)}, {share}"
        pieces.append(BarSegment(OUTSIDE_LAYERS, share, outside / total, 18, tells))
        return CostBar(title, counted(sum(layer.repeats for layer in self.layers), "layer"), pieces)

    def _part_rows(self, cost: Count, indent: str = "") -> list[tuple[str, ...]]:
        return [_row(f"{indent}{part.name}", Count((part,), cost.length), self.cost) for part in cost.components]

    def _bytes(self) -> Table:
        length, memory = self.cost.length, self.memory
        rows = [
            ("weights in fp32", byte_size(4 * self.cost.parameters)),
            ("weights in bf16", byte_size(2 * self.cost.parameters)),
            ("training: weights, copies, gradients, optimizer", byte_size(memory.fixed)),
            (f"training: activations of {length:,} tokens", byte_size(memory.activations)),
        ]
        for layer in self.layers:
            each = ", each" if layer.repeats > 1 else ""
            rows.append((f"  {layer.name}{each}, per token", byte_size(layer.activations)))
        if self.cache:
            rows.append(("generation: cache, per token", byte_size(self.cache)))
            rows.append((f"generation: cache of {length:,} tokens", byte_size(self.cache * length)))
        return Table(("bytes", "size"), rows, "Bytes; training with AdamW, products and cache in bf16")


def costs(model: Config, length: int | None = None) -> Costs:
    """Return the cost of a model, part by part, for sequences of `length` tokens or of its whole context."""
    if length is not None and length < 1:
        raise ModelError(f"length {length}: a sequence has at least one token")
    cost = count(model, length)
    if not cost.parameters:
        raise ModelError(f"an n-gram model has no weights to count: {cost.note}")
    layers, memory = _layers(model, cost.length), training_memory(model, Workload(1, cost.length, "bf16"))
    outside = _sum((cost, 1), *((layer.cost, -layer.repeats) for layer in layers))
    return Costs(cost, layers, outside, memory=memory, cache=cache_bytes(model, "bf16"))


def _layers(model: Config, T: int) -> tuple[LayerCost, ...]:
    """Return the layers of a model for sequences of T tokens."""
    kept = activation_bytes(model, T, narrow("bf16"))[0]
    match model:
        case config.EncoderDecoder():
            below, one = model.encoder_layers or model.layers, count(model.replace(encoder_layers=1, layers=1), T)
            encoder = _sum((count(model.replace(encoder_layers=2, layers=1), T), 1), (one, -1))
            decoder = _sum((count(model.replace(encoder_layers=1, layers=2), T), 1), (one, -1))
            first = LayerCost("encoder layer", below, encoder, activations=kept[0])
            return first, LayerCost("decoder layer", model.layers, decoder, activations=kept[below])
        case config.TransformerConfig():
            sharing, kinds = model.sharing, model.layer_kinds(model.layers)  # shared layers are counted as one
            causal, layers = not isinstance(model, config.Encoder), []
            distinct = getattr(model, "distinct_layers", None) is not None
            sizes = [{"layers": n * sharing} | ({"distinct_layers": n} if distinct else {}) for n in (2, 1)]
            by_limit = {(kind.window, kind.chunk): kind for kind in kinds}
            for limit, kind in by_limit.items():
                name = "layer" if len(model.kinds()) == 1 else f"layer with {reach(kind, causal)}"
                name = name if sharing == 1 else f"{sharing} layers with one set of weights"
                same = model.replace(pattern=(), attention={**model.attention.model_dump(), "window": kind.reach})
                two, one = (count(same.replace(**size), T) for size in sizes)
                repeats = sum((each.window, each.chunk) == limit for each in kinds) // sharing
                layers.append(LayerCost(name, repeats, _sum((two, 1), (one, -1)), activations=sharing * kept[0]))
            return tuple(layers)
        case config.Bengio():
            hidden = Count(tuple(part for part in count(model, T).components if part.in_layers), T)
            return (LayerCost("hidden layer", 1, hidden, activations=kept[0]),)
        case config.Recurrent() | config.ELMo() | config.Bahdanau():
            stacks = len(kept) // model.layers  # Bahdanau's encoder and decoder have `layers` layers each
            one, two = count(model.replace(layers=1), T), count(model.replace(layers=2), T)
            deeper = _sum((two, 1), (one, -1))
            per_layer = {part.name for part in deeper.components}
            lowest = Count(tuple(part for part in one.components if part.name in per_layer), T)
            bytes_ = [sum(kept[stack * model.layers + n] for stack in range(stacks)) for n in range(model.layers)]
            layers = [LayerCost("layer 0", 1, lowest, activations=bytes_[0])]
            if model.layers > 1:
                name = "layer 1" if model.layers == 2 else "deeper layer"
                layers.append(LayerCost(name, model.layers - 1, deeper, activations=bytes_[1]))
            return tuple(layers)
        case _:
            raise ModelError(f"a {type(model).__name__} has no layers to count")


def _sum(*counts: tuple[Count, int]) -> Count:
    """Return the sum of counts, each times its factor, by component; components that vanish are left out."""
    total: dict[str, Component] = {}
    for cost, factor in counts:
        for part in cost.components:
            so_far = total.get(part.name, replace(part, parameters=0, flops=0))
            parameters, flops = so_far.parameters + factor * part.parameters, so_far.flops + factor * part.flops
            total[part.name] = replace(so_far, parameters=parameters, flops=flops)
    return Count(tuple(part for part in total.values() if part.parameters or part.flops), counts[0][0].length)


def _row(name: str, cost: Count, whole: Count) -> tuple[str, ...]:
    return (
        name,
        f"{cost.parameters:,}" if cost.parameters else "",
        f"{cost.parameters / whole.parameters:.1%}" if cost.parameters else "",
        short(round(cost.forward)) if cost.forward else "",
        short(round(cost.training())) if cost.forward else "",
        f"{cost.training() / whole.training():.1%}" if cost.forward else "",
        byte_size(2 * cost.parameters) if cost.parameters else "",
    )


def _count(parameters: float) -> str:
    return f"{round(parameters):,} parameters"


def _flops(training: float) -> str:
    """Return the operations of both passes; the backward pass takes two thirds of a training step."""
    return f"{short(round(training / 3))} FLOPs forward, {short(round(2 * training / 3))} backward"


def _shades(*bars: Shares) -> dict[str, int]:
    """Return the shade of every component that is drawn separately, evenly spaced from dark to light."""
    largest = {name: max(dict(bar)[name] for bar in bars) for name, _ in bars[0]}
    drawn = [*(name for name, share in largest.items() if share >= MIN_SHARE), OTHER]
    return {name: round(92 - 80 * number / (len(drawn) - 1)) for number, name in enumerate(drawn)}


def _pieces(shares: Shares, shades: dict[str, int], text: Formatter) -> list[BarSegment]:
    drawn = [(name, share) for name, share in shares if share >= MIN_SHARE]
    other = sum(share for _, share in shares if share < MIN_SHARE)
    pieces = []
    for name, share in [*drawn, *([(OTHER, other)] if other else [])]:
        label = f"{share:.1%}" if share >= 0.001 else "< 0.1%"
        pieces.append(BarSegment(name, label, share, shades[name], f"{name}: {text(share)}, {label}"))
    return pieces
