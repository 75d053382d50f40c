"""Growth of a model's cost with the length of the text, its width, its depth and its vocabulary.

Every point is `count` on changed settings, and so is every law: the slope at the model's size, and the slope far out,
where only the largest term is left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.config import Config
from weft.costs.count import count
from weft.costs.memory import cache_bytes
from weft.errors import ModelError
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, lines
from weft.figures.tables import Table
from weft.models import config
from weft.nn.config import NoFeedForward
from weft.nn.feedforward_config import with_width

FACTORS = tuple(2.0**power for power in range(-4, 6))  # sizes in a chart, relative to the model's
FAR = 2**12  # factor at which the asymptotic power is measured
MAX_LAYERS = 10_000  # the limit of the settings
POWERS = {0: "", 1: "", 2: "²", 3: "³"}
# setting: name, letter and unit of the axis
SIZES = {
    "context": ("length", "T", "tokens of a text"),
    "d_model": ("width", "d", "coordinates of a token"),
    "layers": ("layers", "L", "layers"),
    "vocab_size": ("vocabulary", "V", "different tokens"),
}


@dataclass(frozen=True)
class GrowthCurve:
    """`values` at each size of an axis, the log-log slope at the model's size, and the power far out."""

    name: str
    values: tuple[float, ...]
    slope: float
    power: int

    def law(self, letter: str) -> str:
        """Return the asymptotic law, such as '∝ d²'."""
        return f"∝ {letter}{POWERS.get(self.power, f'^{self.power}')}" if self.power else "constant"


@dataclass(frozen=True)
class GrowthAxis:
    """One size that grows; `now` is the model's."""

    name: str
    letter: str
    unit: str
    sizes: tuple[int, ...]
    now: int
    curves: tuple[GrowthCurve, ...]


@dataclass(frozen=True)
class Growth(Charts):
    """Parameters, operations and bytes against each size, on logarithmic axes."""

    axes: tuple[GrowthAxis, ...]

    title = "How the cost grows"
    about = TEXTS["growth"]

    def charts(self) -> list[Plot]:
        charts, y = [], Axis("parameters, FLOPs or bytes", log=True, format="number")
        for axis in self.axes:
            x = Axis(axis.unit, log=True, ticks={size: f"{size:,}" for size in axis.sizes[::2]})
            laws = [f"{curve.name}: slope {curve.slope:.2f}, far out {curve.law(axis.letter)}" for curve in axis.curves]
            values = {law: curve.values for law, curve in zip(laws, axis.curves, strict=True)}
            drawn = lines(f"against {axis.name}, {axis.letter}", values, axis.sizes, x=x, y=y)
            charts.append(replace(drawn, marks=[(axis.now, f"this model: {axis.now:,}")], size=(480, 340)))
        return charts

    def tables(self) -> list[Table]:
        rows = [
            (f"{axis.name}, {axis.letter}", f"{axis.now:,}", curve.name, f"{curve.slope:.2f}", curve.law(axis.letter))
            for axis in self.axes
            for curve in axis.curves
        ]
        remark = "A slope of 1 means twice as much at twice the size. Far out, only the largest term is left."
        header = ("grows with", "now", "what", "slope now", "far out")
        return [Table(header, rows, "How the cost grows", [remark], text=(0, 2, 4))]


def growth(model: Config) -> Growth:
    """Return how a model's cost grows with each of its sizes.

    A wider model keeps the size of its heads and the ratios d_ff / d_model and heads / kv_heads. Operations are those
    of training per token, at the full context; the cache is that of one text in bf16.
    """
    if not count(model).forward:
        kind = getattr(model, "kind", type(model).__name__)
        raise ModelError(f"a model of kind '{kind}' only looks values up; it has no products whose cost could grow")
    return Growth(tuple(_axis(model, key) for key in SIZES))


MEASURES: dict[str, Callable[[Any], float]] = {
    "parameters": lambda model: count(model).parameters,
    "FLOPs per token": lambda model: count(model).training(),
    "bytes of a text's cache": lambda model: cache_bytes(model, "bf16") * model.context,
}


def _axis(model: Any, key: str) -> GrowthAxis:
    grown: dict[float, tuple[int, Any]] = {}  # size and settings, by factor
    for factor in (*FACTORS, FAR, 2 * FAR):
        changed = _wider(model, factor) if key == "d_model" else {key: round(getattr(model, key) * factor)}
        if changed is not None and changed[key] >= 1 and (key != "layers" or changed[key] <= MAX_LAYERS):
            grown[factor] = changed[key], model.replace(**changed)
    near = [size for factor, size in grown.items() if factor in (0.5, 1.0, 2.0)]
    far = list(grown.values())[-2:]
    drawn = [size for factor, size in grown.items() if factor in FACTORS]
    curves = []
    for name, measure in MEASURES.items():
        if not measure(model):
            continue  # an encoder has no cache
        ends = ((near[0], near[-1]), far)
        slope, power = (math.log(measure(large) / measure(small)) / math.log(n / m) for (m, small), (n, large) in ends)
        values = tuple(float(measure(changed)) for _, changed in drawn)
        curves.append(GrowthCurve(name, values, slope, power=round(power)))
    sizes = tuple(size for size, _ in drawn)
    return GrowthAxis(*SIZES[key], sizes=sizes, now=getattr(model, key), curves=tuple(curves))


def _wider(model: Any, factor: float) -> dict[str, Any] | None:
    """Return the settings of a model `factor` times as wide, with the same d_head and ratios; None if not integers."""
    if isinstance(model, config.TransformerConfig):
        attention, inner = model.attention, model.feedforward
        sizes = {"d_model": model.d_model, "heads": attention.heads, "d_ff": inner.d_ff}
        sizes = {name: size for name, size in {**sizes, "kv_heads": attention.kv_heads}.items() if size}
    else:
        widths = {key: getattr(model, key, None) for key in ("d_model", "d_embedding", "d_attention")}
        sizes = {key: width for key, width in widths.items() if width is not None}
    if any(size * factor < 1 or size * factor != int(size * factor) for size in sizes.values()):
        return None
    wide: dict[str, Any] = {key: int(size * factor) for key, size in sizes.items()}
    if isinstance(model, config.TransformerConfig):
        heads = {"heads": wide.pop("heads"), "kv_heads": wide.pop("kv_heads", None), "d_head": model.d_head}
        wide["attention"] = attention.replace(**heads)
        if "d_ff" in wide and not isinstance(inner, NoFeedForward):
            wide["feedforward"] = with_width(inner, wide.pop("d_ff"))
    return wide
