"""KV cache while a text is generated, token by token: what is computed, what is read again, and what is not needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from matplotlib.patches import Rectangle

from weft.costs.count import count
from weft.errors import ModelError
from weft.explain.texts import TEXTS
from weft.figures import formats
from weft.figures.charts import Chart, Charts
from weft.figures.picture import SHADES
from weft.figures.tables import Table
from weft.models.config import Config, Decoder

MAX_STEPS = 12  # of a picture whose cells can be told apart
GAP = 2.2  # between the drawings without and with the cache, in cells
LOOKS: dict[str, dict[str, Any]] = {
    "computed": {"facecolor": SHADES(0.85), "edgecolor": "white"},
    "read": {"facecolor": SHADES(0.3), "edgecolor": "white"},
    "dropped": {"facecolor": "none", "edgecolor": "#808080", "linestyle": ":"},
}
MEANINGS = {"computed": "computed in this step", "read": "read from the cache", "dropped": "no longer needed"}


class Products(NamedTuple):
    """Multiplications with the layers' weights, of a query with a key and its value, and with the LM head."""

    token: int  # of a token's vector with all weights of the layers
    pair: int  # of one query with one key and its value, in all layers and heads
    head: int  # of the last vector with the LM head

    def step(self, t: int, *, cached: bool) -> int:
        """Return the multiplications that predict the token after t tokens."""
        tokens, pairs = (1, t) if cached else (t, t * (t + 1) // 2)
        return tokens * self.token + pairs * self.pair + self.head


@dataclass(frozen=True)
class CacheSteps(Charts):
    """Steps of generation after 1 … `steps` tokens, without and with a KV cache."""

    products: Products
    steps: int

    title = "The KV cache, step by step"
    about = TEXTS["cache"]
    columns = 2
    size = (4.4, 3.0)

    def charts(self) -> list[Chart]:
        return [Chart(f"Step {t}", partial(self._draw, t)) for t in range(1, self.steps + 1)]

    def tables(self) -> Sequence[Table]:
        rows, totals = [], [0, 0]
        for t in range(1, self.steps + 1):
            costs = [self.products.step(t, cached=cached) for cached in (False, True)]
            totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
            rows.append((str(t), f"{t}, {t * (t + 1) // 2}", f"{costs[0]:,}", f"1, {t}", str(t - 1), f"{costs[1]:,}"))
        ratio = f"{totals[0] / totals[1]:.2f} times as many"
        rows.append(("all", "", f"{totals[0]:,}", "", "", f"{totals[1]:,}"))
        header = ("step", "tokens, scores", "without", "tokens, scores", "read", "with cache")
        return [Table(header, rows, f"Multiplications: without the cache {ratio}")]

    def _draw(self, t: int, axes: Any) -> None:
        """Draw queries, keys, values and scores after t tokens: without the cache, and with it at the right."""
        n = self.steps
        for cached in (False, True):
            left = cached * (n + GAP)
            for row, name in enumerate(("Q", "K", "V")):
                for token in range(t):
                    old = "dropped" if name == "Q" else "read"
                    _cell(axes, (left + token, row * 1.15), old if cached and token < t - 1 else "computed")
                axes.text(left - 0.3, row * 1.15 + 0.5, name, ha="right", va="center", fontsize=9)
            for query in range(t):
                for key in range(query + 1):
                    _cell(axes, (left + key, 4.2 + query), "dropped" if cached and query < t - 1 else "computed")
            axes.text(left - 0.3, 4.2 + t / 2, "Q Kᵀ", ha="right", va="center", fontsize=9)
            products = formats.number(float(f"{self.products.step(t, cached=cached):.4g}"))
            cost = f"{'with' if cached else 'without'} cache\n{products} multiplications"
            axes.text(left + n / 2, -0.4, cost, ha="center", va="bottom", fontsize=9)
        for row, (look, meaning) in enumerate(MEANINGS.items() if t == 1 and n > 3 else ()):
            _cell(axes, (0.0, 6.2 + 1.25 * row), look)
            axes.text(1.4, 6.7 + 1.25 * row, meaning, va="center", fontsize=9)
        axes.set(xlim=(-1.6, 2 * n + GAP + 0.2), ylim=(4.4 + n, -1.9), aspect="equal")
        axes.axis("off")


def _cell(axes: Any, corner: tuple[float, float], look: str) -> None:
    axes.add_patch(Rectangle(corner, 1.0, 1.0, linewidth=0.8, **LOOKS[look]))


def cache_steps(model: Config, steps: int = 6) -> CacheSteps:
    """Return the steps of generating with a decoder, for prompts of 1 … `steps` tokens."""
    if not isinstance(model, Decoder):
        raise ModelError(f"a model of kind '{getattr(model, 'kind', '?')}' has no KV cache to draw; a decoder has one")
    if not 1 <= steps <= MAX_STEPS:
        raise ModelError(f"steps {steps}: expected 1 to {MAX_STEPS}")
    parts = {part.name: part.flops // 2 for part in count(model, 1).components}
    token = sum(products for name, products in parts.items() if name not in ("attention", "logits"))
    return CacheSteps(Products(token, parts["attention"], parts["logits"]), steps)
