"""The statistics of heads as small maps, layers in rows and heads in columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.explain.attention_figure import NAMES, Kind
from weft.figures.picture import SHADES, new_figure

Table = NDArray[np.float64]  # (layers, heads); NaN where a statistic means nothing
COLUMNS = {
    "entropy": "entropy",
    "distance": "distance",
    "first": "to first",
    "previous": "to previous",
    "itself": "to itself",
    "induction": "induction",
    "cost": "cost",
}
UNITS = {"entropy": "nats", "distance": "tokens", "cost": "nats"}
SHADE_STEPS = 20

Statistics = Mapping[Kind, Mapping[str, Table]]


def known(statistics: Statistics) -> list[str]:
    """The statistics that mean something for these heads."""
    return [name for name in COLUMNS if any(not np.isnan(of[name]).all() for of in statistics.values())]


def small_maps(statistics: Statistics, title: str) -> Figure:
    """A small map of every statistic, for print."""
    names = known(statistics)
    kinds = list(statistics)
    sizes = [statistics[kind]["entropy"].shape for kind in kinds]
    tall = [0.75 + max(0.5, min(0.17, 6.0 / layers) * layers) for layers, _ in sizes]
    wide = 0.75 + max(0.9, min(0.17, 3.0 / max(heads for _, heads in sizes)) * max(heads for _, heads in sizes))
    across = len(names) if len(names) * wide < 12 else -(-len(names) // 2)
    rows = -(-len(names) // across)
    figure = new_figure(max(4.0, across * wide + 0.3), rows * sum(tall) + 0.5)
    figure.suptitle(title, parse_math=False, fontsize=11)
    all_axes: Any = figure.subplots(rows * len(kinds), across, squeeze=False, height_ratios=tall * rows)
    for place in np.ndindex(rows * len(kinds), across):
        which = (place[0] // len(kinds)) * across + place[1]
        kind = kinds[place[0] % len(kinds)]
        axes = all_axes[place]
        if which >= len(names) or np.isnan(statistics[kind][names[which]]).all():
            axes.axis("off")
            continue
        _draw(axes, statistics[kind][names[which]], names[which], kind if len(kinds) > 1 else "")
    return figure


def page_maps(statistics: Statistics) -> list[dict[str, Any]]:
    """The same for a page: the cells of each shade as one path of unit squares."""
    found = []
    for kind, of in statistics.items():
        for name, values in ((name, of[name]) for name in known({kind: of})):
            layers, heads = values.shape
            steps = np.rint(np.clip(values / _top(values, name), 0, 1) * SHADE_STEPS).astype(int)
            shades = []
            for step in range(1, SHADE_STEPS + 1):
                cells = "".join(f"M{head} {layer}h1v1h-1z" for layer, head in np.argwhere(steps == step))
                shades += [(100 * step // SHADE_STEPS, cells)] if cells else []
            layer, head = np.unravel_index(int(np.nanargmax(values)), values.shape)
            largest = f"{values[layer, head]:.2f} {UNITS.get(name, '')}".strip()
            found.append({
                "name": COLUMNS[name] if len(statistics) == 1 else f"{NAMES[kind]}: {COLUMNS[name]}",
                "largest": f"{largest} in {layer}.{head}",
                "top": f"{_top(values, name):.2g}",
                "layers": layers,
                "heads": heads,
                "shades": shades,
            })  # fmt: skip
    return found


def _top(values: Table, name: str) -> float:
    """What the strongest shade stands for."""
    return 1.0 if name in ("first", "previous", "itself", "induction") else max(float(np.nanmax(values)), 1e-9)


def _draw(axes: Any, values: Table, name: str, kind: str) -> None:
    """One statistic of all heads, (layers, heads)."""
    layers, heads = values.shape
    top = _top(values, name)
    image = axes.imshow(values, cmap=SHADES, vmin=0.0, vmax=top, aspect="equal", interpolation="nearest")
    unit = f" ({UNITS[name]})" if name in UNITS else ""
    axes.set_title(f"{kind} {COLUMNS[name]}{unit}".strip(), fontsize=8)
    axes.set_xticks(range(0, heads, -(-heads // 6)))
    axes.set_yticks(range(0, layers, -(-layers // 8)))
    axes.tick_params(labelsize=6, length=0, pad=1)
    for layer, head in zip(*np.nonzero(values < -0.05 * top), strict=True):
        axes.text(head, layer, "–", ha="center", va="center", fontsize=6)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.03)
    bar.ax.tick_params(labelsize=6, length=1, pad=1)
    bar.outline.set_linewidth(0.4)
