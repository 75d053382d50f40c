"""An evaluation as a page: what a text costs, what that is made of, and what of the text was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.evaluate.details import Bucket, Details
from weft.evaluate.overlap import Overlap, overlap_tables
from weft.figures.charts import Chart, Charts, grid
from weft.figures.picture import COLOURS
from weft.figures.tables import Table

PASSAGE = 96  # characters of a passage that a page shows


@dataclass(frozen=True)
class EvaluationPage(Charts):
    """The metrics of a text, as a table; its details as charts and tables; its overlap, where it was looked for."""

    title: str
    metrics: Table
    details: Details
    overlap: Overlap | None = None

    about = (
        "What a text costs the model, in nats per token: by the number of tokens that were seen before, by how often "
        "a token occurs in the training text, and where it is most surprising."
    )

    def charts(self) -> list[Chart]:
        """Loss by context and by frequency."""
        seen, known = self.details.positions, self.details.frequencies
        charts = [Chart("Loss by tokens seen before", lambda axes: _bars(axes, seen, "tokens seen before"))]
        if known:
            label = "occurrences in the training text"
            charts.append(Chart("Loss by frequency of the token", lambda axes: _bars(axes, known, label)))
        return charts

    def tables(self) -> list[Table]:
        """The metrics, and what the charts say in numbers."""
        shared = [] if self.overlap is None else overlap_tables(self.overlap, PASSAGE)
        return [self.metrics, *self.details.tables(PASSAGE), *shared]


def _bars(axes: Any, buckets: Sequence[Bucket], label: str) -> None:
    places = range(len(buckets))
    axes.bar(places, [each.loss for each in buckets], color=COLOURS[0], width=0.7)
    axes.set_xticks(list(places), [each.name for each in buckets], rotation=40, ha="right", rotation_mode="anchor")
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylabel("nats per token", fontsize=9)
    grid(axes)
