"""An evaluation as a page: metrics of a text, their breakdown, and the overlap with the training text."""

from dataclasses import dataclass

from weft.evaluate.details import Details
from weft.evaluate.overlap import Overlap, overlap_tables
from weft.figures.charts import Charts
from weft.figures.plot import Plot, bars
from weft.figures.tables import Table

PASSAGE_CHARACTERS = 96  # shown of a passage


@dataclass(frozen=True)
class EvaluationPage(Charts):
    """Metrics of a text as a table, their details as charts and tables, and the overlap if it was computed."""

    title: str
    metrics: Table
    details: Details
    overlap: Overlap | None = None

    about = (
        "What a text costs the model, in nats per token: by the number of tokens that were seen before, by how often "
        "a token occurs in the training text, and where it is most surprising."
    )

    def charts(self) -> list[Plot]:
        seen, rare = self.details.positions, self.details.frequencies
        parts = [("Loss by tokens seen before", "tokens seen before", seen)]
        parts.append(("Loss by frequency of the token", "occurrences in the training text", rare))
        drawn = ((title, {each.name: each.loss for each in buckets}, x) for title, x, buckets in parts if buckets)
        return [bars(*each, y_label="nats per token") for each in drawn]

    def tables(self) -> list[Table]:
        shared = [] if self.overlap is None else overlap_tables(self.overlap, PASSAGE_CHARACTERS)
        return [self.metrics, *self.details.tables(PASSAGE_CHARACTERS), *shared]
