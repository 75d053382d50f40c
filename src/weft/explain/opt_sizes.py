"""Where the operations of an update go for OPT's sizes: weft's count beside the lecture's table."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.explain import size_tables
from weft.explain.charts import Chart, Charts, grid, legend, line
from weft.explain.plan import Table

PARTS = ("MHA projections", "FFN", "attention", "logits")


@dataclass(frozen=True)
class OPTShares(Charts):
    """Percent of an update's operations, (sizes, 4) by weft's count and on the slide."""

    title: str
    about: str
    sizes: tuple[str, ...]
    ours: NDArray[np.float64]
    slide: NDArray[np.float64]

    def charts(self) -> list[Chart]:
        """One a part."""
        return [Chart(part, partial(self._draw, column=column)) for column, part in enumerate(PARTS)]

    def tables(self) -> list[Table]:
        """Both in numbers."""
        return [size_tables.opt_table()]

    def _draw(self, axes: Any, column: int) -> None:
        places = range(len(self.sizes))
        line(axes, places, self.ours[:, column], 0, "weft's count", marker="o", markersize=3)
        line(axes, places, self.slide[:, column], 1, "slide", marker="s", markersize=3)
        axes.set_xticks(places, self.sizes)
        axes.set_ylim(0, None)
        axes.set_ylabel("% of FLOPs", fontsize=9)
        grid(axes)
        legend(axes)


def opt_shares() -> OPTShares:
    """The shares of projections, feed-forward, attention and logits for OPT's eight sizes (Zhang et al. 2022)."""
    rows = size_tables.OPT
    shares = [size_tables.opt_shares(row) for row in rows]
    return OPTShares(
        title="Where OPT's operations go",
        about=(
            "Percent of the floating-point operations of a training update, the layers recomputed once, by size of the"
            " model. The feed-forward share rises with size, those of attention and logits fall."
        ),
        sizes=tuple(row.name for row in rows),
        ours=np.array([[share[part] for part in PARTS] for share in shares]),
        slide=np.array([(row.projections, row.feedforward, row.attention, row.logits) for row in rows]),
    )
