"""How a model's cost grows: with the length of the text, its width, its depth and its vocabulary.

Every point is `count` on changed settings, and so is every law: the slope where the model stands, and the slope far
out, where the largest term is all that is left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.config import Config
from weft.costs.count import count
from weft.costs.memory import cache_bytes
from weft.costs.units import short
from weft.errors import ModelError
from weft.explain.texts import TEXTS
from weft.figures import plot
from weft.figures.charts import Charts
from weft.figures.plot import Plot, lines
from weft.figures.tables import Table
from weft.models import config

SHOWN = tuple(2.0**power for power in range(-4, 6))  # times the model's own size
FAR = 2**12
MAX_LAYERS = 10_000  # as many as settings allow
POWERS = {0: "", 1: "", 2: "²", 3: "³"}
# settings that grow, with their names, letters and what they count
SIZES = {
    "context": ("length", "T", "tokens of a text"),
    "d_model": ("width", "d", "coordinates of a token"),
    "layers": ("layers", "L", "layers"),
    "vocab_size": ("vocabulary", "V", "different tokens"),
}


@dataclass(frozen=True)
class Curve:
    """`values` at each of an axis's sizes; the log-log slope at the model's own size, and the power far out."""

    name: str
    values: tuple[float, ...]
    slope: float
    power: int

    def law(self, letter: str) -> str:
        """'∝ d²'."""
        return f"∝ {letter}{POWERS.get(self.power, f'^{self.power}')}" if self.power else "constant"


@dataclass(frozen=True)
class Axis:
    """What is made larger; `now` is the model's own size."""

    name: str
    letter: str
    unit: str
    sizes: tuple[int, ...]
    now: int
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Growth(Charts):
    """Parameters, operations and bytes against each size, on logarithmic axes."""

    axes: tuple[Axis, ...]

    title = "How the cost grows"
    about = TEXTS["growth"]

    def charts(self) -> list[Plot]:
        return [_chart(axis) for axis in self.axes]

    def tables(self) -> list[Table]:
        rows = [
            (f"{axis.name}, {axis.letter}", f"{axis.now:,}", curve.name, f"{curve.slope:.2f}", curve.law(axis.letter))
            for axis in self.axes
            for curve in axis.curves
        ]
        remark = "A slope of 1 means twice as much at twice the size. Far out only the largest term is left."
        header = ("grows with", "now", "what", "slope now", "far out")
        return [Table(header, rows, "How the cost grows", [remark], text=(0, 2, 4))]


def growth(model: Config) -> Growth:
    """How the cost of a model grows with each of its sizes.

    Width keeps the size of heads and the ratios d_ff / d_model and heads / kv_heads. Training operations are those of
    a token in a text as long as the context, which `length` changes; the cache is that of one such text in bf16.
    """
    if not count(model).parameters:
        raise ModelError("an n-gram model has no sizes to grow with: the text decides how many counts there are")
    return Growth(tuple(_axis(model, key) for key in SIZES))


MEASURES: dict[str, Callable[[Any], float]] = {
    "parameters": lambda model: count(model).parameters,
    "FLOPs a token": lambda model: count(model).training(),
    "bytes of a text's cache": lambda model: cache_bytes(model, "bf16") * model.context,
}


def _axis(model: Any, key: str) -> Axis:
    grown: dict[float, tuple[int, Any]] = {}  # (size, settings) by how many times larger it is
    for factor in (*SHOWN, FAR, 2 * FAR):
        changed = _wider(model, factor) if key == "d_model" else {key: round(getattr(model, key) * factor)}
        if changed is not None and changed[key] >= 1 and (key != "layers" or changed[key] <= MAX_LAYERS):
            grown[factor] = changed[key], model.replace(**changed)
    near = [size for factor, size in grown.items() if factor in (0.5, 1.0, 2.0)]
    far = list(grown.values())[-2:]
    shown = [size for factor, size in grown.items() if factor in SHOWN]
    curves = []
    for what, measure in MEASURES.items():
        if not measure(model):
            continue  # an encoder keeps no cache
        slope, end = (
            math.log(measure(large) / measure(small)) / math.log(n / m)
            for (m, small), (n, large) in ((near[0], near[-1]), far)
        )
        values = tuple(float(measure(changed)) for _, changed in shown)
        curves.append(Curve(what, values, slope, round(end)))
    return Axis(*SIZES[key], tuple(size for size, _ in shown), getattr(model, key), tuple(curves))


def _wider(model: Any, factor: float) -> dict[str, Any] | None:
    """The sizes of a model that is so many times as wide; None where they are no whole numbers."""
    if isinstance(model, config.TransformerConfig):
        attention, inner = model.attention, model.feedforward
        sizes = {"d_model": model.d_model, "heads": attention.heads, "d_ff": inner.d_ff}
        sizes |= {"kv_heads": attention.kv_heads} if attention.kv_heads else {}
    else:
        widths = {key: getattr(model, key, None) for key in ("d_model", "d_embedding", "d_attention")}
        sizes = {key: width for key, width in widths.items() if width is not None}
    wide = {key: size * factor for key, size in sizes.items()}
    if any(size < 1 or size != int(size) for size in wide.values()):
        return None
    wide = {key: int(size) for key, size in wide.items()}
    if not isinstance(model, config.TransformerConfig):
        return wide
    return {
        "d_model": wide["d_model"],
        "attention": attention.replace(heads=wide["heads"], d_head=model.d_head, kv_heads=wide.get("kv_heads")),
        "feedforward": inner.replace(d_ff=wide["d_ff"]),
    }


def _chart(axis: Axis) -> Plot:
    laws = [f"{curve.name}: slope {curve.slope:.2f}, far out {curve.law(axis.letter)}" for curve in axis.curves]
    values = {law: curve.values for law, curve in zip(laws, axis.curves, strict=True)}
    x = plot.Axis(axis.unit, log=True, ticks={size: f"{size:,}" for size in axis.sizes[::2]})
    y = plot.Axis("parameters, FLOPs or bytes", log=True, named=short)
    drawn = lines(f"against {axis.name}, {axis.letter}", values, axis.sizes, x, y)
    return replace(drawn, marks=[(axis.now, f"this model: {axis.now:,}")], size=(480, 340))
