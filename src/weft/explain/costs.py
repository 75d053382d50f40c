"""What a model costs, drawn: parameters, operations and bytes, by component and by layer, from the settings alone.

`count` and `memory` do the counting. What one layer costs is what a model has more with one layer more.
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
from weft.figures.page import html_tables, mounted
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.tables import Table, text_tables
from weft.models import config

MIN_SHARE = 0.01  # that is drawn by itself, and not together with others
OTHER = "other"


@dataclass(frozen=True)
class LayerCost:
    """`repeats` layers that cost the same: one of them as `cost`, with bytes a token in bf16."""

    name: str
    repeats: int
    cost: Count
    activations: float
    cache: float


@dataclass(frozen=True)
class Costs(Picture):
    """A model's cost for sequences of `cost.length` tokens.

    `layers` from the bottom up, `around` what stands around them; `memory` of training one sequence in bf16.
    """

    cost: Count
    layers: tuple[LayerCost, ...]
    around: Count
    memory: Memory
    cache: int  # bytes a token in bf16

    scripts = ("costs.js",)
    title = "What it costs"
    about = TEXTS["costs"]

    def tables(self) -> list[Table]:
        return [self._by_component(), self._by_layer(), self._bytes()]

    def text(self) -> str:
        return text_tables(self.tables())

    def html(self) -> str:
        return mounted("costs.js", self.data()) + html_tables(self.tables())

    def data(self) -> dict[str, Any]:
        """What web/costs.js draws."""
        bars = self.bars()
        return {"bars": [{**bar._asdict(), "pieces": [piece._asdict() for piece in bar.pieces]} for bar in bars]}

    def figure(self) -> Figure:
        bars = self.bars()
        figure = new_figure(7.2, 1.02 * len(bars))
        for number, bar in enumerate(bars, 1):
            _draw(figure.add_subplot(len(bars), 1, number), bar)
        return figure

    def bars(self) -> list["Bar"]:
        """What is drawn: how shares of parameters, operations and bytes are made up."""
        parts, cost, tokens = self.cost.components, self.cost, f"{self.cost.length:,} tokens"
        flops = [(part.name, cost.share(part)) for part in parts]
        weights = [(part.name, part.parameters / cost.parameters) for part in parts]
        whole, copies = self.memory.total(), {"copies": "16-bit copies"}
        parts_of_memory = ("weights", "copies", "gradients", "optimizer", "activations", "logits")
        memory = [(copies.get(name, name), getattr(self.memory, name) / whole) for name in parts_of_memory]
        shades = _shades(weights, flops)  # a component has the same shade in both
        forward_and_training = f"{short(cost.forward)} forward, {short(cost.training())} in training"
        in_layers = [each.cost.parameters for each in self.layers]
        training = [each.cost.training() for each in self.layers]
        return [
            _bar("Parameters", f"{cost.parameters:,}", weights, shades, lambda share: _count(share * cost.parameters)),
            _bar("FLOPs a token", forward_and_training, flops, shades, lambda share: _flops(share * cost.training())),
            self._layers_bar("Parameters by layer", in_layers, cost.parameters, _count),
            self._layers_bar("FLOPs by layer", training, cost.training(), _flops),
            _bar(
                f"Bytes in training on one sequence of {tokens}",
                byte_size(whole),
                memory,
                _shades(memory),
                lambda share: byte_size(share * whole),
            ),
        ]

    def _layers_bar(self, title: str, costs: Sequence[float], total: float, told: "Told") -> "Bar":
        pieces, inside = list[Piece](), 0.0
        for layer, cost in zip(self.layers, costs, strict=True):
            inside += layer.repeats * cost
            several, share = layer.repeats > 1, cost / total
            each = f"{share:.1%} each" if several else f"{share:.1%}"
            for number in range(layer.repeats):  # neighbours differ, so that they can be counted
                name = "" if number else f"{layer.repeats} × {layer.name}" if several else layer.name
                one = f"{layer.name} {number}" if several else layer.name
                tells = f"{one}: {told(cost)}, {share:.1%}"
                pieces.append(Piece(name, each, share, 55 if number % 2 else 75, tells))
        around, name = total - inside, "around the layers"
        tells = f"{name}: {told(around)}, {around / total:.1%}"
        pieces.append(Piece(name, f"{around / total:.1%}", around / total, 18, tells))
        return Bar(title, counted(sum(layer.repeats for layer in self.layers), "layer"), pieces)

    def _by_component(self) -> Table:
        cost = self.cost
        rows = [_row(part.name, Count((part,), cost.length), cost) for part in cost.components]
        title = f"By component; FLOPs a token, at {cost.length:,} tokens a sequence"
        remarks = [*([cost.note] if cost.note else []), TEXTS["components"]]
        return Table(HEADER, [*rows, _row("all", cost, cost)], title, remarks)

    def _by_layer(self) -> Table:
        rows = []
        for layer in self.layers:
            times = f"{layer.repeats} × {layer.name}, each" if layer.repeats > 1 else layer.name
            inner = self._inner(layer.cost) if len(layer.cost.components) > 1 else []
            rows += [_row(times, layer.cost, self.cost), *inner]
        rows += [_row("around the layers", self.around, self.cost), *self._inner(self.around)]
        return Table(HEADER, rows, "By layer; FLOPs a token")

    def _inner(self, cost: Count) -> list[tuple[str, ...]]:
        return [_row(f"  {part.name}", Count((part,), cost.length), self.cost) for part in cost.components]

    def _bytes(self) -> Table:
        length, kept = self.cost.length, self.memory
        rows = [
            ("weights in fp32", byte_size(4 * self.cost.parameters)),
            ("weights in bf16", byte_size(2 * self.cost.parameters)),
            ("training: weights, copies, gradients, optimizer", byte_size(kept.fixed)),
            (f"training: activations of {length:,} tokens", byte_size(kept.activations)),
        ]
        for layer in self.layers:
            each = ", each" if layer.repeats > 1 else ""
            rows.append((f"  {layer.name}{each}, a token", byte_size(layer.activations)))
        if self.cache:
            rows += [
                ("generation: cache, a token", byte_size(self.cache)),
                (f"generation: cache of {length:,} tokens", byte_size(self.cache * length)),
            ]
        return Table(("bytes", "size"), rows, "Bytes; training with AdamW, products and cache in bf16")


HEADER = ("part", "parameters", "share", "forward", "training", "share", "bf16")


def costs(model: Config, length: int | None = None) -> Costs:
    """What a model costs, part by part; for sequences of `length` tokens, or of its whole context."""
    if length is not None and length < 1:
        raise ModelError(f"length {length}: a sequence has at least one token")
    cost = count(model, length)
    if not cost.parameters:
        raise ModelError(f"an n-gram model has no weights to count: {cost.note}")
    layers = _layers(model, cost)
    around = _sum((cost, 1), *((layer.cost, -layer.repeats) for layer in layers))
    memory = training_memory(model, Workload(1, cost.length, "bf16"))
    return Costs(cost, layers, around, memory, cache_bytes(model, "bf16"))


def _layers(model: Config, cost: Count) -> tuple[LayerCost, ...]:
    T = cost.length
    kept = activation_bytes(model, T, narrow("bf16"))[0]
    match model:
        case config.EncoderDecoder():
            below = model.encoder_layers or model.layers
            one = count(model.replace(encoder_layers=1, layers=1), T)
            encoder = _more(count(model.replace(encoder_layers=2, layers=1), T), one)
            decoder = _more(count(model.replace(encoder_layers=1, layers=2), T), one)
            cache = cache_bytes(model, "bf16") / model.layers
            return (
                LayerCost("encoder layer", below, encoder, kept[0], 0.0),
                LayerCost("decoder layer", model.layers, decoder, kept[below], cache),
            )
        case config.TransformerConfig():
            together = model.sharing  # layers that share their weights are counted as one
            cache, kinds = cache_bytes(model, "bf16") / model.layers, model.layer_kinds(model.layers)
            causal, found = not isinstance(model, config.Encoder), []
            distinct = getattr(model, "distinct_layers", None) is not None
            sizes = [{"layers": n * together} | ({"distinct_layers": n} if distinct else {}) for n in (2, 1)]
            for window in dict.fromkeys(kind.window for kind in kinds):
                name = "layer" if len(model.kinds()) == 1 else f"layer with {reach(window, causal)}"
                name = name if together == 1 else f"{together} layers with one set of weights"
                own = model.replace(pattern=(), attention={**model.attention.model_dump(), "window": window})
                each = _more(*(count(own.replace(**size), T) for size in sizes))
                repeats = sum(kind.window == window for kind in kinds) // together
                found.append(LayerCost(name, repeats, each, together * kept[0], together * cache))
            return tuple(found)
        case config.Recurrent() | config.Bahdanau():
            # a Bahdanau model's encoder and decoder have as many layers each
            ways, cache = len(kept) // model.layers, cache_bytes(model, "bf16") / model.layers
            first, second = count(model.replace(layers=1), T), count(model.replace(layers=2), T)
            deeper = _more(second, first)
            grows = {part.name for part in deeper.components}
            lowest = Count(tuple(part for part in first.components if part.name in grows), T)
            deeps = [LayerCost("layer 0", 1, lowest, sum(kept[way * model.layers] for way in range(ways)), cache)]
            if model.layers > 1:
                activations = sum(kept[way * model.layers + 1] for way in range(ways))
                name = "layer 1" if model.layers == 2 else "deeper layer"
                deeps.append(LayerCost(name, model.layers - 1, deeper, activations, cache))
            return tuple(deeps)
        case _:
            raise ModelError(f"a {type(model).__name__} has no layers to count")


def _more(larger: Count, smaller: Count) -> Count:
    return _sum((larger, 1), (smaller, -1))


def _sum(*counts: tuple[Count, int]) -> Count:
    """Counts so many times each, by the names of their parts, without those that come to nothing."""
    found: dict[str, Component] = {}
    for cost, times in counts:
        for part in cost.components:
            so_far = found.get(part.name, replace(part, parameters=0, flops=0))
            parameters, flops = so_far.parameters + times * part.parameters, so_far.flops + times * part.flops
            found[part.name] = replace(so_far, parameters=parameters, flops=flops)
    return Count(tuple(part for part in found.values() if part.parameters or part.flops), counts[0][0].length)


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


class Piece(NamedTuple):
    """A piece of a bar: its `share` of the whole, how much of the dark colour is in it, in percent, and how much it is.

    Of pieces that are alike the first has a `name`; what `tells` of it has all of them.
    """

    name: str
    label: str
    share: float
    shade: int
    tells: str = ""


class Bar(NamedTuple):
    """A whole and its pieces."""

    title: str
    total: str
    pieces: list[Piece]


Shares = Sequence[tuple[str, float]]
Told = Callable[[float], str]


def _count(parameters: float) -> str:
    return f"{round(parameters):,} parameters"


def _flops(training: float) -> str:
    """Training is three forward passes, two of them backwards."""
    return f"{short(round(training / 3))} FLOPs forward, {short(round(2 * training / 3))} backward"


def _shades(*bars: Shares) -> dict[str, int]:
    """How dark each piece is that is large enough to be drawn by itself, evenly from dark to light."""
    names = {name: max(dict(bar)[name] for bar in bars) for name, _ in bars[0]}
    drawn = [*(name for name, share in names.items() if share >= MIN_SHARE), OTHER]
    return {name: round(92 - 80 * number / (len(drawn) - 1)) for number, name in enumerate(drawn)}


def _bar(title: str, total: str, shares: Shares, shades: dict[str, int], told: Told) -> Bar:
    large = [(name, share) for name, share in shares if share >= MIN_SHARE]
    rest = sum(share for _, share in shares if share < MIN_SHARE)
    pieces = []
    for name, share in [*large, *([(OTHER, rest)] if rest else [])]:
        label = f"{share:.1%}" if share >= 0.001 else "< 0.1%"
        pieces.append(Piece(name, label, share, shades[name], f"{name}: {told(share)}, {label}"))
    return Bar(title, total, pieces)


def _draw(axes: Any, bar: Bar) -> None:
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
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.02), ncols=4, frameon=False, fontsize=8, **space)
