"""A comparison on one page, in a terminal and as figures."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from markupsafe import Markup
from matplotlib.figure import Figure

from weft.compare.charts import effects_chart, loss_charts, multiplier_chart, sweep_charts
from weft.compare.drawing import Drawing, Panels, html_charts, html_notes, html_top
from weft.compare.effects import Effect, main_effects
from weft.compare.results import Comparison
from weft.compare.standings import Standing, standings
from weft.compare.table import effects_table, grid_table, html_standings, text_effects, text_standings
from weft.compare.wording import method, result, warnings
from weft.figures.page import Section
from weft.figures.picture import Picture
from weft.figures.tables import WIDTH, html_tables

MANY = 6  # small charts that a page shows unasked


@dataclass(frozen=True)
class ComparisonPage(Picture):
    """Everything that a comparison found. What is resampled is resampled once."""

    comparison: Comparison
    scripts: ClassVar[tuple[str, ...]] = ("compare.js",)

    @property
    def title(self) -> str:  # type: ignore[override]
        """The comparison's."""
        return self.comparison.title

    @property
    def about(self) -> str:  # type: ignore[override]
        """What it is."""
        return (
            "Trained on the same text at equal compute, and measured on the same held-out part of it. Bits per byte is"
            " what a model needs to spell a byte of that text: lower is better."
        )

    @property
    def result(self) -> str:
        """Who is best and by how much, in a sentence or two."""
        return result(self.standings)

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """How the contenders stand, best first."""
        return standings(self.comparison)

    @cached_property
    def effects(self) -> list[Effect]:
        """Main effects of an ablation."""
        varied = self.comparison.varied
        return main_effects(self.comparison.contenders, varied) if varied else []

    def figure(self) -> Figure:
        """The first chart."""
        return self.drawings()[0].figure()

    def drawings(self) -> list[Drawing | Panels]:
        """All charts, in reading order."""
        found = self.standings
        drawings = [*self._losses(), multiplier_chart(found), effects_chart(self.effects), sweep_charts(found)]
        return [drawing for drawing in drawings if drawing]

    def _losses(self) -> list[Drawing]:
        """Loss against what it took; an ablation at one share of the budget has no curves to draw."""
        single = all(len(standing.contender.shares) <= 1 for standing in self.standings)
        return [] if self.comparison.varied and single else loss_charts(self.standings)

    def text(self) -> str:
        """The table, the effects, the result and what weakens it, in 80 columns."""
        parts = [text_standings(self.standings)]
        if self.effects:
            parts.append(text_effects(self.effects))
        told = [self.result, *warnings(self.standings)]
        parts += [textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False) for each in told]
        return "\n\n".join(parts)

    def record(self) -> dict[str, Any]:
        """The same as values: the result, and a record for each contender, best first."""
        return {"result": self.result, "contenders": [standing.record() for standing in self.standings]}

    def sections(self) -> list[Section]:
        """From the result to how it was measured."""
        found = self.standings
        multipliers, effects, sweep = multiplier_chart(found), effects_chart(self.effects), sweep_charts(found)
        top = html_top(self.result, self.comparison.facts, self.comparison.command)
        sections = [
            Section("The result", "", top, self.scripts),
            Section("The contenders", TABLE, str(html_standings(found))),
        ]
        if losses := self._losses():
            sections.append(Section("Loss against what it took", losses[0].about, html_charts(losses)))
        if multipliers:
            sections.append(Section("Multipliers", multipliers.about, html_charts([multipliers])))
        if effects and self.comparison.varied:
            tables = html_tables([effects_table(self.effects), grid_table(found, self.comparison.varied)])
            sections.append(Section("Main effects", effects.about, html_charts([effects]) + tables))
        if sweep:
            sections.append(Section("Learning rates", sweep.about, _sweep(sweep.drawings)))
        sections.append(Section("How it was measured", "", html_notes(method(self.comparison, found))))
        return sections


TABLE = (
    "The best is on top. Everything is that of one training run with the whole budget, and the mean over seeds where"
    " they differ. The multiplier says how many times the FLOPs the baseline needs for the same loss: above 1× is"
    " better than the baseline."
)


def _sweep(drawings: Sequence[Drawing]) -> Markup:
    charts = html_charts(drawings, "cmp-small")
    if len(drawings) <= MANY:
        return charts
    return Markup('<details class="cost-fold"><summary>{} charts</summary>{}</details>').format(len(drawings), charts)
