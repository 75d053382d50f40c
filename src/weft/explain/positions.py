"""How a model knows the positions of its tokens, drawn: what is added as stripes, and what a distance does to a score.

Whatever the kind, the picture is made of what the module itself does: what `embed` adds to zeros, how `rotate` rotates,
which `bias` the scores get. So a kind that is declared elsewhere is drawn too.
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
from weft.nn.position import Disentangled, LearnedT5, Position, build, sinusoids
from weft.nn.position_config import Rotary, Sizes

LAYOUTS: tuple[Literal["interleaved", "tensor2tensor"], ...] = ("interleaved", "tensor2tensor")
SHIFTS = (0, 1, 10, 100, 1000)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Encoding:
    """A kind of positions: `stripes` (length, d) that are added, or none; a `curve` each against distances 0 … length.

    `exact` is the largest difference between products of the same distance, where they should not differ at all.
    """

    name: str
    stripes: Floats | None
    curves: dict[str, Floats]
    what: str  # the curves are of
    exact: dict[str, float] | None = None


@dataclass(frozen=True)
class Positions(Charts):
    """What a model does with positions, up to `length`: one thing, or two."""

    length: int
    encodings: tuple[Encoding, ...]

    title = "Positions"
    about = TEXTS["positions"]

    def charts(self) -> list[Chart | Plot]:
        found: list[Chart | Plot] = []
        for each in self.encodings:
            if each.stripes is not None:
                found.append(Chart(f"{each.name}: what is added", partial(_draw_stripes, each.stripes)))
            if each.curves:
                title, places = f"{each.name}: {each.what}", range(self.length)
                found.append(lines(title, each.curves, places, Axis("distance"), Axis()))
        return found

    def tables(self) -> list[Table]:
        tables = [small_sinusoids()] if any(each.name == "sinusoidal" for each in self.encodings) else []
        shifts = [(each.name, *pair) for each in self.encodings for pair in (each.exact or {}).items()]
        if shifts:
            exact = [(name, layout, f"{error:.1e}") for name, layout, error in shifts]
            remark = TEXTS["rotated-products"].format(shifts=", ".join(map(str, SHIFTS[1:])))
            tables.append(Table(("positions", "pairs", "differs by"), exact, "Rotated products", [remark], text=(0, 1)))
        distances = [distance for distance in (0, 1, 2, 4, 8, 16, 64) if distance < self.length]
        rows = [
            (each.name, name, *(f"{curve[distance]:.3f}" for distance in distances))
            for each in self.encodings
            for name, curve in each.curves.items()
        ]
        if rows:
            tables.append(Table(("positions", "", *map(str, distances)), rows, "Against distance", text=(0, 1)))
        return tables


def positions(model: TransformerConfig | Transformer, length: int = 128) -> Positions:
    """The first `length` positions of a model, whose trained table is shown, or of settings."""
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
            own = settings.sizes(settings.layers, True)
            sizes = Sizes(own.d_model, own.heads, own.d_head, max(length, own.context), True, 1)
            module = build(settings.position, sizes)
            reset(module, Initialiser(NormalInit(), sizes.d_model, sizes.layers))
        kinds = {settings.position.kind: module}
        if isinstance(module, LearnedT5):  # it does two things
            kinds = {"learned": module.added, "t5": module.scored}
        found = tuple(_encoding(name, each, sizes, attention, length) for name, each in kinds.items())
    return Positions(length, found)


def small_sinusoids() -> Table:
    """The sinusoids of d_model = 4 at positions 0, 1, 2, in the formula's layout and in the figure's (lecture 4)."""
    rows = [
        (layout, str(place), *(f"{value:.4f}" for value in sinusoids(torch.tensor(place), 4, layout).tolist()))
        for layout in LAYOUTS
        for place in range(3)
    ]
    remark = "interleaved: sin, cos, sin, cos (Vaswani et al. 2017, §3.5); tensor2tensor: sines first, then cosines."
    header = ("layout", "position", *(f"{i}" for i in range(4)))
    return Table(header, rows, "Sinusoids of d_model = 4", [remark])


def _encoding(name: str, module: Position, sizes: Sizes, attention: Any, length: int) -> Encoding:
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    places = torch.arange(length, device=device)[None]
    added = module.embed(torch.zeros(1, length, sizes.d_model, dtype=torch.float64, device=device), places)[0].double()
    if bool(added.any()):
        # the mean product of two rows so many places apart, over the product of a row with itself
        products = added @ added.T
        means = [products.diagonal(offset).mean() for offset in range(length)]
        curves = {"mean": _array(torch.stack(means) / means[0])}
        return Encoding(name, _array(added), curves, "product of two positions")
    if module.angles(places, length, torch.float64) is not None:
        return _rotated(name, module, sizes, length)
    if (bias := module.bias(places, places)) is not None:
        shown = range(0, sizes.heads, max(1, sizes.heads // 4))
        curves = {f"head {head}": _array(bias[0, head, -1].flip(0).double()) for head in list(shown)[:4]}
        return Encoding(name, None, curves, "added to the score")
    if (rows := module.distances(places, places)) is not None:
        # each row of a layer's table belongs to a distance; how alike are they to that of distance 0?
        table = module.vectors() if isinstance(module, Disentangled) else getattr(attention, "relative_keys", None)
        if table is None:
            table = torch.nn.init.xavier_uniform_(torch.empty(int(rows.max()) + 1, sizes.d_head))
        near = table.double()[rows[0, -1].flip(0)]
        return Encoding(name, None, {"key vectors": _array(near @ near[0])}, "product with the vector of distance 0")
    return Encoding(name, None, {}, "nothing")


def _rotated(name: str, module: Position, sizes: Sizes, length: int) -> Encoding:
    """q·k of two equal vectors that were rotated, and of random ones how much a shift changes it, in both layouts."""
    d = sizes.d_head
    ones = torch.ones(1, 1, 1, d, dtype=torch.float64) / d**0.5
    rotated = _rotate(module, ones.expand(1, 1, length, d), torch.arange(length))
    layouts = {name: module}
    if isinstance(settings := getattr(module, "settings", None), Rotary):
        other: Literal["halves", "adjacent"] = "adjacent" if settings.pairs == "halves" else "halves"
        layouts = {settings.pairs: module, other: build(settings.replace(pairs=other), sizes)}
    exact = {pairs: _shifted(each, d, length) for pairs, each in layouts.items()}
    return Encoding(name, None, {"q = k": _array(rotated @ rotated[0])}, "product of q and k", exact)


def _shifted(module: Position, d: int, length: int) -> float:
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, d, generator=rng, dtype=torch.float64)
    places = torch.arange(length)
    products = []
    for shift in SHIFTS:
        moved = _rotate(module, q.expand(1, 1, length, d), places + shift)
        fixed = _rotate(module, k.expand(1, 1, 1, d), torch.tensor([shift]))
        products.append(moved @ fixed[0])
    return max(float((each - products[0]).abs().max()) for each in products)


def _rotate(module: Position, x: Tensor, places: Tensor) -> Tensor:
    """x (1, 1, time, d) rotated as at these places: (time, d)."""
    angles = module.angles(places[None], int(places.max()) + 1, torch.float64)
    assert angles is not None
    return module.rotate(x, angles)[0, 0]


def _array(values: Tensor) -> Floats:
    return values.cpu().numpy().astype(np.float64) + 0.0  # no −0


def _draw_stripes(stripes: Floats, axes: Any) -> None:
    most = float(np.abs(stripes).max())
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "rasterized": True}
    image = axes.imshow(stripes, cmap=SHADES, vmin=-most, vmax=most, **look)
    axes.set_xlabel("coordinate", fontsize=9)
    axes.set_ylabel("position", fontsize=9)
    axes.figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=8)
