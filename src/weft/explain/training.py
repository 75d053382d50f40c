"""Training of a run, as it was logged."""

from dataclasses import dataclass

from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Plot
from weft.figures.tables import Table


@dataclass(frozen=True)
class Training(Charts):
    """Curves of a run, and tables of its epochs, sources and events."""

    title: str
    plots: tuple[Plot, ...]
    logged: tuple[Table, ...]

    about = TEXTS["training"]

    def charts(self) -> list[Plot]:
        return list(self.plots)

    def tables(self) -> list[Table]:
        return list(self.logged)
