"""Number formats: their sign, exponent and mantissa bits, their ranges, and the size of a model in each."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from matplotlib.patches import Rectangle

from weft.costs.units import byte_size
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.formats import scientific, table_number
from weft.figures.picture import COLOURS
from weft.figures.tables import Table

# name → dtype; an IEEE format reserves its largest exponent for infinity and NaN, e4m3 only one of its codes
FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
PARTS = {"sign": COLOURS[1], "exponent": COLOURS[2], "mantissa": COLOURS[0]}


class NumberFormat(NamedTuple):
    """Bits of a format, and its largest, smallest normal and smallest positive values; `spacing` is that after 1."""

    name: str
    bits: int
    exponent: int
    largest: float
    smallest: float
    tiniest: float
    spacing: float

    @property
    def mantissa(self) -> int:
        return self.bits - 1 - self.exponent

    @property
    def parts(self) -> str:
        """One letter per bit, from the highest: s, e or m."""
        return "s" + "e" * self.exponent + "m" * self.mantissa


@dataclass(frozen=True)
class Precision(Charts):
    """Number formats, and the parameters of a model that could be stored in each."""

    formats: tuple[NumberFormat, ...]
    parameters: int

    title = "Number formats"
    about = TEXTS["precision"]
    columns = 1
    size = (6.2, 4.9)

    def charts(self) -> list[Chart]:
        return [Chart("Sign, exponent and mantissa", self._draw)]

    def _draw(self, axes: Any) -> None:
        axes.set_axis_off()
        axes.set(xlim=(-0.2, 32.2), ylim=(-len(self.formats) - 0.6, 0.15))
        for row, each in enumerate(self.formats):
            top = -row - 0.5
            axes.text(0, top + 0.09, each.name, fontsize=9.5, weight="bold", va="bottom")
            span = f"±{_power(each.largest)}" if each.exponent else f"−128 … {each.largest:g}"
            small = f", from {_power(each.tiniest)}" if each.exponent else ""
            axes.text(32, top + 0.09, f"{span}{small}", fontsize=9, va="bottom", ha="right")
            for bit, part in enumerate(each.parts):
                name = next(name for name in PARTS if name.startswith(part))
                axes.add_patch(Rectangle((bit, top - 0.36), 0.92, 0.38, facecolor=PARTS[name], edgecolor="none"))
        for place, (name, colour) in enumerate(PARTS.items()):
            x, y = 9.5 * place, -len(self.formats) - 0.45
            axes.add_patch(Rectangle((x, y), 0.92, 0.22, facecolor=colour, edgecolor="none"))
            axes.text(x + 1.4, y + 0.11, name, fontsize=9, va="center")

    def tables(self) -> list[Table]:
        rows = []
        for each in self.formats:
            bits = map(str, (each.bits, 1, each.exponent, each.mantissa))
            ranges = (table_number(value) if value else "" for value in each[3:])
            weights = byte_size(self.parameters * each.bits // 8) if self.parameters else ""
            rows.append((each.name, *bits, *ranges, weights))
        columns = ("largest", "smallest", "subnormal", "after 1")
        header = ("format", "bits", "sign", "exponent", "mantissa", *columns, "weights")
        return [Table(header, rows, self.title, [TEXTS["precision-table"]], spare=(2, 7))]


def _power(value: float) -> str:
    return scientific(value) if value >= 1e5 or value < 1e-2 else f"{value:,g}"


def precision(parameters: int) -> Precision:
    """Return the formats, and the size of a model with this many parameters in each."""
    return Precision(tuple(_format(name, dtype) for name, dtype in FORMATS.items()), parameters)


def _format(name: str, dtype: torch.dtype) -> NumberFormat:
    if not dtype.is_floating_point:
        return NumberFormat(name, 8, 0, largest=127.0, smallest=1.0, tiniest=1.0, spacing=1.0)
    info = torch.finfo(dtype)
    exponent = info.bits - 1 - round(-math.log2(info.eps))
    ranges = {"largest": info.max, "smallest": info.tiny, "tiniest": info.tiny * info.eps, "spacing": info.eps}
    return NumberFormat(name, info.bits, exponent, **ranges)
