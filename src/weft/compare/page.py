"""A comparison on one page, in a terminal and as figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from markupsafe import Markup

from weft.compare.charts import effect_name, effects_chart, loss_charts, multiplier_chart, sweep_charts
from weft.compare.effects import Effect, main_effects
from weft.compare.multiplier import BEYOND
from weft.compare.ranking import NOTHING, Ranked, flops_text, ranking
from weft.compare.results import Comparison
from weft.compare.wording import method, result, warnings
from weft.costs.units import plain, short
from weft.figures.charts import Panels, PanelsPage
from weft.figures.page import Section, html_table, html_tables, part
from weft.figures.shapes import html_plots
from weft.figures.tables import WIDTH, Table, text_table, wrapped

MAX_OPEN = 6  # small charts, or samples, that a page shows unasked


@dataclass(frozen=True)
class ComparisonPage(PanelsPage):
    """Everything that a comparison found. What is resampled is resampled once."""

    comparison: Comparison
    about: str = (
        "Trained on the same text at equal compute, and measured on the same held-out part of it. Bits per byte is"
        " what a model needs to spell a byte of that text: lower is better."
    )
    scripts: ClassVar[tuple[str, ...]] = ("command.js",)

    @property
    def title(self) -> str:  # type: ignore[override]
        """The comparison's."""
        return self.comparison.title

    @property
    def result(self) -> str:
        """Who is best and by how much, in a sentence or two."""
        return result(self.ranking)

    @cached_property
    def ranking(self) -> tuple[Ranked, ...]:
        """The contenders, best first."""
        return ranking(self.comparison)

    @cached_property
    def effects(self) -> list[Effect]:
        """Main effects of an ablation."""
        varied = self.comparison.varied
        return main_effects(self.comparison.contenders, varied) if varied else []

    def panels(self) -> list[Panels]:
        """All charts, in reading order."""
        found = [multiplier_chart(self.ranking), effects_chart(self.effects), sweep_charts(self.ranking)]
        return [*self._losses(), *filter(None, found)]

    def _losses(self) -> list[Panels]:
        """Loss against what it took; an ablation at one share of the budget has no curves to draw."""
        single = all(len(ranked.result.shares) <= 1 for ranked in self.ranking)
        return [] if self.comparison.varied and single else loss_charts(self.ranking)

    def text(self) -> str:
        """The table, the effects, the result and what weakens it, in 80 columns."""
        tables = [ranking_table(self.ranking), *([effects_table(self.effects)] if self.effects else [])]
        told = ["\n".join(wrapped(each)) for each in (self.result, *warnings(self.ranking))]
        return "\n\n".join([*(text_table(table, WIDTH) for table in tables), *told])

    def record(self) -> dict[str, Any]:
        """The same as values: the result, and a record for each contender, best first."""
        return {"result": self.result, "contenders": [ranked.record() for ranked in self.ranking]}

    def sections(self) -> list[Section]:
        """From the result to how it was measured."""
        found, comparison = self.ranking, self.comparison
        top = part("lead", self.result) + part("facts", comparison.facts) + part("command", comparison.command)
        sections = [
            Section("The result", "", top, self.scripts),
            Section("The contenders", TABLE, html_ranking(found)),
        ]
        if losses := self._losses():
            plots = [plot for panels in losses for plot in panels.plots]
            sections.append(Section("Loss against what it took", losses[0].about, html_plots(plots)))
        if multipliers := multiplier_chart(found):
            sections.append(Section("Multipliers", multipliers.about, html_plots(multipliers.plots)))
        if (effects := effects_chart(self.effects)) and comparison.varied:
            tables = html_tables([effects_table(self.effects), grid_table(found, comparison.varied)])
            sections.append(Section("Main effects", effects.about, html_plots(effects.plots) + tables))
        if sweep := sweep_charts(found):
            charts = html_plots(sweep.plots, "small")
            charts = charts if len(sweep.plots) <= MAX_OPEN else part("fold", f"{len(sweep.plots)} charts", charts)
            sections.append(Section("Learning rates", sweep.about, charts))
        return [*sections, Section("How it was measured", "", part("notes", method(comparison, found)))]


# ---- tables

TABLE = (
    "The best is on top. Everything is that of one training run with the whole budget, and the mean over seeds where"
    " they differ. The multiplier says how many times the FLOPs the baseline needs for the same loss: above 1× is"
    " better than the baseline."
)


def _cells(ranked: Ranked) -> dict[str, str]:
    """What there is to tell of a contender, by the names of columns."""
    columns = ("parameters", "tokens", "FLOPs", "seconds", "bits per byte", "95 % interval", "rate", "multiplier")
    if not ranked.finished:
        return dict.fromkeys(columns, NOTHING) | {"multiplier": "failed"}
    low, high = ranked.bounds
    rate = ranked.result.rate
    values = (
        short(ranked.mean("parameters")),
        short(ranked.mean("tokens")),
        flops_text(ranked.mean("flops")),
        plain(ranked.mean("seconds")),
        f"{ranked.bits:.3f}",
        f"{low:.3f}–{high:.3f}",
        NOTHING if rate is None else f"{rate:.2g}",
        ranked.multiplier_text(),
    )
    return dict(zip(columns, values, strict=True))


def ranking_table(found: Sequence[Ranked]) -> Table:
    """Best first, for a terminal of 80 columns."""
    header = ("contender", "parameters", "FLOPs", "bits per byte", "rate", "multiplier")
    rows = []
    for ranked in found:
        cells = _cells(ranked) | ({"bits per byte": ranked.bits_text()} if ranked.finished else {})
        rows.append((ranked.name, *(cells[column].replace(BEYOND, "0–∞") for column in header[1:])))
    return Table(header, rows)


def html_ranking(found: Sequence[Ranked]) -> Markup:
    """Best first; on a narrow page every contender is a card. Below, a sample of what each one writes."""
    rows = [[part("named", each.name, each.differs), *_cells(each).values()] for each in found]
    marked = [number for number, ranked in enumerate(found) if ranked.baseline]
    table = Table(("contender", *_cells(found[0])), rows)
    samples = [part("fold", f"What {each.name} writes", part("texts", [each.sample])) for each in found if each.sample]
    told = Markup("").join(samples)
    told = told if len(samples) <= MAX_OPEN else part("fold", "What they write", told)
    return html_table(table, row_names=True, cards=True, marked=marked) + told


def effects_table(effects: Sequence[Effect]) -> Table:
    """Main effects in numbers. Of the pairs that the mean is taken over, how many were planned where some failed."""
    rows = [
        (
            effect_name(each),
            f"{each.difference:+.4f}",
            f"{each.low:+.4f} to {each.high:+.4f}",
            str(each.pairs) if each.pairs == each.planned else f"{each.pairs} of {each.planned}",
        )
        for each in effects
    ]
    remark = "A negative change is better: fewer bits per byte with the value on the right of the arrow."
    return Table(("setting", "bits per byte", "95 % interval", "pairs"), rows, "Main effects", [remark])


def grid_table(found: Sequence[Ranked], varied: Mapping[str, tuple[str, ...]]) -> Table:
    """Every combination that was trained, best first."""
    rows = [
        (*(each.result.levels.get(setting, NOTHING) for setting in varied), each.bits_text(), each.multiplier_text())
        for each in found
        if each.result.levels is not None
    ]
    return Table((*varied, "bits per byte", "multiplier"), rows, "The grid, best first", text=range(len(varied)))
