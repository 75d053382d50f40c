"""Learning-rate schedule of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.figures.charts import Charts
from weft.figures.formats import table_number
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.tables import Table


@dataclass(frozen=True)
class Schedule(Charts):
    """Learning rate of each step, (steps,)."""

    title: str
    rates: NDArray[np.float64]

    about = "The learning rate at every step of the run, from the first to the last."
    columns = 1

    def charts(self) -> list[Plot]:
        peak = int(self.rates.argmax())
        rates = Series(points=list(enumerate(self.rates.tolist(), 1)))
        label = f"peak {self.rates[peak]:.3g} at step {peak + 1:,}"
        top = Series(points=[(peak + 1, float(self.rates[peak]))], look=Look("c1", "o"), labels=[label])
        x, y = Axis("step"), Axis("learning rate", includes=(0.0,), pad=0.1)
        return [Plot(self.title, [rates, top], x, y, size=(640, 300))]

    def tables(self) -> list[Table]:
        steps, peak = len(self.rates), int(self.rates.argmax())
        listed = sorted({0, *(steps * part // 10 for part in range(1, 10)), steps - 1, peak})
        rows = [(f"{step + 1:,}", table_number(self.rates[step]), "peak" if step == peak else "") for step in listed]
        return [Table(("step", "rate", ""), rows, self.title, text=(2,))]


def schedule(rates: Sequence[float], title: str) -> Schedule:
    """Return a picture of learning rates, one per step."""
    return Schedule(title, np.asarray(rates, dtype=np.float64))
