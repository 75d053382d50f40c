"""A learning rate over the steps of a run, drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError
from weft.figures.charts import Chart, Charts, grid, line
from weft.figures.tables import Table


@dataclass(frozen=True)
class Schedule(Charts):
    """The rate of each step, (steps,), the first one first."""

    title: str
    rates: NDArray[np.float64]

    about = "The learning rate at every step of the run, from the first to the last."
    columns = 1
    size = (6.4, 3.0)

    def charts(self) -> list[Chart]:
        return [Chart(self.title, self._draw)]

    def tables(self) -> list[Table]:
        """Its peak and some steps between."""
        steps, peak = len(self.rates), int(self.rates.argmax())
        places = sorted({0, *(steps * part // 10 for part in range(1, 10)), steps - 1, peak})
        rows = [(f"{step + 1:,}", f"{self.rates[step]:.3e}", "peak" if step == peak else "") for step in places]
        return [Table(("step", "rate", ""), rows, self.title, text=(2,))]

    def _draw(self, axes: Any) -> None:
        peak = int(self.rates.argmax())
        line(axes, np.arange(1, len(self.rates) + 1), self.rates, 0)
        aside, side = (-8, "right") if peak > len(self.rates) / 2 else (8, "left")
        axes.annotate(
            f"peak {self.rates[peak]:.3g} at step {peak + 1:,}", (peak + 1, self.rates[peak]), fontsize=8.5,
            xytext=(aside, 4), textcoords="offset points", ha=side,
        )  # fmt: skip
        axes.set_ylim(0, float(self.rates.max()) * 1.15 or 1.0)
        axes.set_xlabel("step", fontsize=9)
        axes.set_ylabel("learning rate", fontsize=9)
        grid(axes)


def schedule(rates: Sequence[float], title: str) -> Schedule:
    """A picture of learning rates, one a step, whoever computed them."""
    values = np.asarray(rates, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise DataError(f"{title}: expected at least one learning rate, all of them finite numbers")
    return Schedule(title, values)
