"""Position encodings of a model: added vectors as stripes, and the effect of distance on a product or score.

The pictures are computed by the position module itself: what `embed` adds to zeros, how `rotate` rotates, which `bias`
the scores get. So position encodings that are declared elsewhere are drawn too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import ConfigError, ModelError
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.picture import SHADES
from weft.figures.plot import Axis, Plot, lines
from weft.figures.tables import Table
from weft.models.config import TransformerConfig
from weft.models.transformer import Transformer
from weft.nn.block import Block
from weft.nn.config import NormalInit
from weft.nn.init import Initialiser, reset
from weft.nn.position import Disentangled, LearnedT5, Position, Tempered, build, sinusoids
from weft.nn.position_config import Rotary, Sizes

LAYOUTS: tuple[Literal["interleaved", "tensor2tensor"], ...] = ("interleaved", "tensor2tensor")
SHIFTS = (0, 1, 10, 100, 1000)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Encoding:
    """One position encoding: `stripes` (length, d) that it adds, if any, and curves over the distances 0 … length."""

    name: str
    stripes: Floats | None
    curves: dict[str, Floats]
    curve_label: str
    exact: dict[str, float] | None = None  # by layout, the largest difference of rotated products of equal distance


@dataclass(frozen=True)
class Positions(Charts):
    """Position encodings of a model up to `length`: one, or two that are combined."""

    length: int
    encodings: tuple[Encoding, ...]

    title = "Positions"
    about = TEXTS["positions"]

    def charts(self) -> list[Chart | Plot]:
        charts: list[Chart | Plot] = []
        for each in self.encodings:
            if each.stripes is not None:
                charts.append(Chart(f"{each.name}: what is added", partial(_draw_stripes, each.stripes)))
            title = f"{each.name}: {each.curve_label}"
            charts.append(lines(title, each.curves, range(self.length), x=Axis("distance"), y=Axis()))
        return charts

    def tables(self) -> list[Table]:
        tables = []
        if any(each.name == "sinusoidal" for each in self.encodings):  # d_model = 4, in the layouts of lecture 4
            small = {(each, n): sinusoids(torch.tensor(n), 4, each).tolist() for each in LAYOUTS for n in range(3)}
            cells = [(each, str(n), *(f"{value:.4f}" for value in row)) for (each, n), row in small.items()]
            header = ("layout", "position", *map(str, range(4)))
            tables.append(Table(header, cells, "Sinusoids of d_model = 4", [TEXTS["sinusoids"]]))
        shifts = [(each.name, *pair) for each in self.encodings for pair in (each.exact or {}).items()]
        if shifts:
            rows = [(name, layout, f"{error:.1e}") for name, layout, error in shifts]
            remark = TEXTS["rotated-products"].format(shifts=", ".join(map(str, SHIFTS[1:])))
            tables.append(Table(("positions", "pairs", "differs by"), rows, "Rotated products", [remark], text=(0, 1)))
        distances = [distance for distance in (0, 1, 2, 4, 8, 16, 64) if distance < self.length]
        named = [(each.name, name, curve) for each in self.encodings for name, curve in each.curves.items()]
        curves = [(kind, name, *(f"{curve[n]:.3f}" for n in distances)) for kind, name, curve in named]
        return [*tables, Table(("positions", "", *map(str, distances)), curves, "Against distance", text=(0, 1))]


def positions(model: TransformerConfig | Transformer, length: int = 128) -> Positions:
    """Return the first `length` positions of a model, with its trained table, or of settings."""
    if length < 2:
        raise ConfigError(f"length = {length}: expected two positions or more")
    settings = model if isinstance(model, TransformerConfig) else model.config
    attention = None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(model, Transformer):
            stack = model.decoder or model.encoder
            assert stack is not None
            if settings.position.bounded and length > settings.context:
                raise ModelError(f"length {length}: the model's positions end at model.context = {settings.context}")
            sizes, module = settings.sizes(len(stack.layers), stack.causal), stack.position
            attention = cast(Block, stack.blocks[0]).attention
        else:
            sizes = settings.sizes(settings.layers, True)
            sizes = Sizes(sizes.d_model, sizes.heads, sizes.d_head, max(length, sizes.context), causal=True, layers=1)
            module = build(settings.position, sizes)
            reset(module, Initialiser(NormalInit(), sizes.d_model, sizes.layers))
        modules = {settings.position.kind: module}
        if isinstance(module, LearnedT5):
            modules = {"learned": module.added, "t5": module.scored}
        encodings = (_encoding(name, each, sizes, attention=attention, length=length) for name, each in modules.items())
        return Positions(length, tuple(encodings))


def _encoding(name: str, module: Position, sizes: Sizes, *, attention: Any, length: int) -> Encoding:
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    indices = torch.arange(length, device=device)[None]
    # concatenated positions have their own coordinates: nothing is before them here
    beside = module.settings.concatenated_width(sizes.d_model) if module.settings is not None else 0
    zeros = torch.zeros(1, length, sizes.d_model - beside, dtype=torch.float64, device=device)
    added = module.embed(zeros, indices)[0, :, -beside:].double()
    if bool(added.any()):
        # The mean product of two rows at each distance, relative to that of a row with itself.
        products = added @ added.T
        means = [products.diagonal(offset).mean() for offset in range(length)]
        curves = {"mean": _array(torch.stack(means) / means[0])}
        return Encoding(name, _array(added), curves, curve_label="product of two positions")
    if module.angles(indices, length, torch.float64) is not None:
        return _rotary_encoding(name, module, sizes, length=length)
    if (bias := module.bias(indices, indices)) is not None:
        heads = range(0, sizes.heads, max(1, sizes.heads // 4))
        curves = {f"head {head}": _array(bias[0, head, -1].flip(0).double()) for head in list(heads)[:4]}
        return Encoding(name, None, curves, curve_label="added to the score")
    if isinstance(module, Tempered):
        factors = module.scale_queries(torch.ones(1, 1, length, 1, dtype=torch.float64, device=device), indices)
        return Encoding(name, None, {"every head": _array(factors.flatten())}, "factor of queries, from the beginning")
    if type(module).distances is Position.distances:
        raise ModelError(f"positions of kind '{name}' change neither embeddings nor scores: there is nothing to draw")
    # Each row of a layer's table belongs to a distance; compare it with the row of distance 0.
    rows = module.distances(indices, indices)
    table = module.vectors() if isinstance(module, Disentangled) else getattr(attention, "relative_keys", None)
    if table is None:
        table = torch.nn.init.xavier_uniform_(torch.empty(int(rows.max()) + 1, sizes.d_head))
    vectors = table.double()[rows[0, -1].flip(0)]
    curves = {"key vectors": _array(vectors @ vectors[0])}
    return Encoding(name, None, curves, curve_label="product with the vector of distance 0")


def _rotary_encoding(name: str, module: Position, sizes: Sizes, *, length: int) -> Encoding:
    """Return q·k of two equal rotated vectors, and how much a shift changes the product, in both layouts of pairs."""
    d = sizes.d_head
    ones = torch.ones(1, 1, 1, d, dtype=torch.float64) / d**0.5
    rotated = _rotate(module, ones.expand(1, 1, length, d), torch.arange(length))
    layouts = {name: module}
    if isinstance(settings := getattr(module, "settings", None), Rotary):
        other: Literal["halves", "adjacent"] = "adjacent" if settings.pairs == "halves" else "halves"
        layouts = {settings.pairs: module, other: build(settings.replace(pairs=other), sizes)}
    exact = {pairs: _shift_error(each, d, length) for pairs, each in layouts.items()}
    return Encoding(name, None, {"q = k": _array(rotated @ rotated[0])}, curve_label="product of q and k", exact=exact)


def _shift_error(module: Position, d: int, length: int) -> float:
    """Return the largest change of the products of random q and k when both positions are shifted."""
    q, k = torch.randn(2, 1, 1, 1, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products = []
    for shift in SHIFTS:
        queries = _rotate(module, q.expand(1, 1, length, d), torch.arange(length) + shift)
        products.append(queries @ _rotate(module, k.expand(1, 1, 1, d), torch.tensor([shift]))[0])
    return max(float((each - products[0]).abs().max()) for each in products)


def _rotate(module: Position, x: Tensor, indices: Tensor) -> Tensor:
    """Return x (1, 1, time, d) rotated to these positions, (time, d)."""
    angles = module.angles(indices[None], int(indices.max()) + 1, torch.float64)
    assert angles is not None
    return module.rotate(x, angles)[0, 0]


def _array(values: Tensor) -> Floats:
    return values.cpu().numpy().astype(np.float64) + 0.0  # −0 becomes 0


def _draw_stripes(stripes: Floats, axes: Any) -> None:
    bound = float(np.abs(stripes).max())
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "rasterized": True}
    image = axes.imshow(stripes, cmap=SHADES, vmin=-bound, vmax=bound, **look)
    axes.set_xlabel("coordinate", fontsize=9)
    axes.set_ylabel("position", fontsize=9)
    axes.figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=9)
