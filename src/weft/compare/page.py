"""A comparison on one page, in a terminal and as figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from weft.compare.jobs import Comparison, Outcome, fraction
from weft.compare.multiplier import BEYOND
from weft.compare.ranking import NOTHING, Effect, Ranked, flops_text, main_effects, method, ranking, result, warnings
from weft.costs.units import plain, short
from weft.figures.charts import Panels, PanelsPage
from weft.figures.page import Section, html_table, html_tables, mounted, part
from weft.figures.plot import LOOKS, Axis, Look, Plot, Point, Series, Whisker, multiple, scientific, signed, whiskers
from weft.figures.prose import prose
from weft.figures.shapes import html_plots, plot_data
from weft.figures.tables import WIDTH, Table, text_table, wrapped

TEXTS = prose(__file__)
MAX_OPEN = 6  # small charts, or samples, that a page shows unasked
AMOUNTS: dict[str, tuple[str, Callable[[float], str]]] = {  # what it is called, and how a number of it is written
    "flops": ("FLOPs", scientific),
    "tokens": ("tokens", short),
    "steps": ("steps", short),
    "seconds": ("seconds", plain),
}
BITS = Axis("bits per byte", log=True, named=lambda tick: f"{tick:.4g}", pad=0.08)
BASELINE, FAINT = Look("ink", "o"), Look("soft", ".", width=0.9)
SMALL = (320, 240)


@dataclass(frozen=True)
class ComparisonPage(PanelsPage):
    """Everything that a comparison found. What is resampled is resampled once."""

    comparison: Comparison
    about: str = TEXTS["comparison"]

    @property
    def title(self) -> str:  # type: ignore[override]
        return self.comparison.title

    @property
    def result(self) -> str:
        """Who is best and by how much, in a sentence or two."""
        return result(self.ranking)

    @cached_property
    def ranking(self) -> tuple[Ranked, ...]:
        return ranking(self.comparison)

    @cached_property
    def effects(self) -> list[Effect]:
        varied = self.comparison.varied
        return main_effects(self.comparison.contenders, varied) if varied else []

    def panels(self) -> list[Panels]:
        # an ablation at one share of the budget has no curves to draw
        single = all(len(ranked.result.shares) <= 1 for ranked in self.ranking)
        losses = [] if self.comparison.varied and single else loss_charts(self.ranking)
        found = [ranking_chart(self.ranking), multiplier_chart(self.ranking), effects_chart(self.effects)]
        return [*losses, *filter(None, [*found, sweep_charts(self.ranking)])]

    def text(self) -> str:
        tables = [ranking_table(self.ranking), *([effects_table(self.effects)] if self.effects else [])]
        told = ["\n".join(wrapped(each)) for each in (self.result, *warnings(self.ranking))]
        return "\n\n".join([*(text_table(table, WIDTH) for table in tables), *told])

    def record(self) -> dict[str, Any]:
        """The same as values: the result, and a record for each contender, best first."""
        return {"result": self.result, "contenders": [ranked.record() for ranked in self.ranking]}

    def data(self) -> dict[str, Any]:
        """What the Explorer shows of it: the same texts, numbers and charts as values."""
        found, comparison = self.ranking, self.comparison
        told = {"kind": "compare", "title": self.title, "about": self.about, "result": self.result}
        rows = [[each.name, *_cells(each).values()] for each in found]
        contenders = [{"name": each.name, "differs": each.differs, "sample": each.sample} for each in found]
        tables = [Table(("contender", *COLUMNS), rows, "The contenders", [TEXTS["contenders"]])]
        tables += [effects_table(self.effects)] if self.effects else []
        return {
            **told,
            **study_data(self.panels(), tables, method(comparison, found)),
            "contenders": contenders,
            "facts": comparison.facts,
            "command": comparison.command,
        }

    def sections(self) -> list[Section]:
        found, comparison = self.ranking, self.comparison
        first = result_section(self.result, comparison.facts, comparison.command)
        sections = [first, Section("The contenders", TEXTS["contenders"], html_ranking(found))]
        titles = {
            "ranking": "Ranking",
            "multipliers": "Multipliers",
            "effects": "Main effects",
            "sweep": "Learning rates",
        }
        for title, group in groupby(self.panels(), lambda each: titles.get(each.name, "Loss against what it took")):
            panels = list(group)
            plots = [plot for each in panels for plot in each.plots]
            charts = html_plots(plots, "small" if title == titles["sweep"] else "")
            if title == titles["sweep"] and len(plots) > MAX_OPEN:
                charts = part("fold", f"{len(plots)} charts", charts)
            elif title == titles["effects"]:
                charts += html_tables([effects_table(self.effects), grid_table(found, comparison.varied or {})])
            sections.append(Section(title, panels[0].about, charts, ("chart.js",)))
        return [*sections, Section("How it was measured", "", part("notes", method(comparison, found)))]


def study_data(panels: Sequence[Panels], tables: Sequence[Table], notes: Sequence[str]) -> dict[str, Any]:
    """What comparisons and scaling laws have in common, as values."""
    return {
        "panels": [
            {"name": each.name, "about": each.about, "plots": [plot_data(plot) for plot in each.plots]}
            for each in panels
        ],
        "tables": [table._asdict() for table in tables],
        "notes": list(notes),
    }


def result_section(result: str, facts: Mapping[str, str], command: str) -> Section:
    """What a page begins with: the result, what it was measured on, and the command that repeats it."""
    html = part("lead", result) + part("facts", facts) + mounted("command.js", command, part("command", command))
    return Section("The result", "", html, ("command.js",))


COLUMNS: dict[str, Callable[[Ranked], str]] = {  # what there is to tell of a contender that finished
    "parameters": lambda ranked: short(ranked.mean("parameters")),
    "tokens": lambda ranked: short(ranked.mean("tokens")),
    "FLOPs": lambda ranked: flops_text(ranked.mean("flops")),
    "seconds": lambda ranked: plain(ranked.mean("seconds")),
    "bits per byte": lambda ranked: f"{ranked.bits:.3f}",
    "95 % interval": lambda ranked: "–".join(f"{end:.3f}" for end in ranked.bounds),
    "rate": lambda ranked: NOTHING if ranked.result.rate is None else f"{ranked.result.rate:.2g}",
    "multiplier": Ranked.multiplier_text,
}


def _cells(ranked: Ranked) -> dict[str, str]:
    if not ranked.finished:
        return dict.fromkeys(COLUMNS, NOTHING) | {"multiplier": "failed"}
    return {name: told(ranked) for name, told in COLUMNS.items()}


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
    table = Table(("contender", *COLUMNS), rows)
    samples = [part("fold", f"What {each.name} writes", part("texts", [each.sample])) for each in found if each.sample]
    told = Markup("").join(samples)
    told = told if len(samples) <= MAX_OPEN else part("fold", "What they write", told)
    return html_table(table, row_names=True, cards=True, marked=marked) + told


def effects_table(effects: Sequence[Effect]) -> Table:
    """Main effects in numbers. Of the pairs that the mean is taken over, how many were planned where some failed."""
    rows = []
    for each in effects:
        pairs = str(each.pairs) if each.pairs == each.planned else f"{each.pairs} of {each.planned}"
        rows.append((each.name, f"{each.difference:+.4f}", f"{each.low:+.4f} to {each.high:+.4f}", pairs))
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


def looks(found: Sequence[Ranked]) -> dict[str, Look]:
    """How each contender is drawn: the baseline in ink, the best four others in colour, what is left in grey."""
    others = [ranked.name for ranked in found if not ranked.baseline and ranked.finished]
    chosen = {name: LOOKS[number] if number < len(LOOKS) else FAINT for number, name in enumerate(others)}
    return chosen | {ranked.name: BASELINE for ranked in found if ranked.baseline}


def loss_charts(found: Sequence[Ranked]) -> list[Panels]:
    """Bits per byte against FLOPs, tokens and seconds."""
    done = [ranked for ranked in found if ranked.finished]
    chosen = looks(done)
    grey = [name for name, look in chosen.items() if look is FAINT]
    others = grey if len(grey) < 2 else [f"{len(grey)} others"]
    charts = []
    for amount, (what, named) in AMOUNTS.items():
        if any(ranked.mean(amount) > 0 for ranked in done):
            series = [each for ranked in done for each in _loss_series(ranked, amount, chosen[ranked.name])]
            series = sorted(series, key=lambda each: bool(each.name))  # what has a name is drawn on top
            series += [Series(name, look=FAINT) for name in others]
            height = 330 + 17 * sum(len(each.name) > 30 for each in series)  # a line each under the title
            axis = Axis(f"{what} in training", log=True, named=named, pad=0.06)
            plot = Plot(f"Bits per byte against {what}", series, axis, BITS, size=(480, height))
            charts.append(Panels(f"loss-{amount}", TEXTS["loss"], [plot]))
    return charts


def _loss_series(ranked: Ranked, amount: str, look: Look) -> list[Series]:
    """A line through the shares of the budget; of what has no place on the axis, a level."""
    rungs = [ranked.result.at(share) for share in ranked.result.shares]
    amounts = [float(np.mean([getattr(outcome, amount) for outcome in rung])) for rung in rungs]
    bits = [[outcome.bits_per_byte for outcome in rung] for rung in rungs]
    if not max(amounts):
        return [Series(ranked.name, look=look._replace(marker=""), level=ranked.bits)]
    means = [(spent, float(np.mean(seeds))) for spent, seeds in zip(amounts, bits, strict=True)]
    if look is FAINT:
        return [Series(points=means, look=look)]
    behind = [Series(points=_progress(rung[0], amount), look=Look(look.colour), background=True) for rung in rungs]
    return [*behind, Series(ranked.name, means, look, [(min(seeds), max(seeds)) for seeds in bits])]


def _progress(outcome: Outcome, amount: str) -> list[Point]:
    """The evaluations during training: operations and seconds are spent evenly over tokens."""
    whole = getattr(outcome, amount)
    each = whole / outcome.tokens if outcome.tokens else 0.0
    points = [(tokens * each, bits) for tokens, bits in outcome.progress if 0 < tokens < outcome.tokens]
    return [*points, (whole, outcome.bits_per_byte)]


def ranking_chart(found: Sequence[Ranked]) -> Panels | None:
    """Bits per byte of each contender that finished, the best on top."""
    done, chosen = [ranked for ranked in found if ranked.finished], looks(found)
    if not done:
        return None
    base = next((ranked for ranked in done if ranked.baseline), done[0])
    rows = [
        Whisker(f"{each.bits_text()}  {each.name}", each.bits, *each.bounds, chosen[each.name]._replace(width=0))
        for each in done
    ]
    axis = replace(BITS, label="← better · bits per byte", log=False)
    return Panels(
        "ranking", TEXTS["ranking"].format(base=base.name), [whiskers("Bits per byte", rows, axis, base.bits)]
    )


def multiplier_chart(found: Sequence[Ranked]) -> Panels | None:
    """The multiplier of each contender that has one; None where none has."""
    chosen = looks(found)
    rows = [
        Whisker(f"{times.text()}  {each.name}", times.value, times.low, times.high, chosen[each.name], times.beyond)
        for each in found
        if (times := each.multiplier)
    ]
    if not rows:
        return None
    base = next(ranked.name for ranked in found if ranked.baseline)
    axis = Axis("times as many FLOPs for the baseline", log=True, named=multiple)
    return Panels(
        "multipliers",
        TEXTS["multipliers"].format(base=base),
        [whiskers(f"Compute multiplier against {base}", rows, axis, 1.0)],
    )


def effects_chart(effects: Sequence[Effect]) -> Panels | None:
    """The main effect of every value of a setting against its base."""
    if not effects:
        return None
    rows = []
    for each in effects:  # better, worse, or neither as far as the interval tells
        unclear, change = each.low <= 0 <= each.high, each.difference
        look = Look("soft", "o") if unclear else LOOKS[0] if change < 0 else LOOKS[1]
        rows.append(Whisker(f"{change:+.3f}  {each.name}", change, each.low, each.high, look))
    axis = Axis("← better · change in bits per byte · worse →", named=signed)
    return Panels("effects", TEXTS["effects"], [whiskers("Main effects", rows, axis, 0.0)])


def sweep_charts(found: Sequence[Ranked]) -> Panels | None:
    """Loss against learning rate, a small chart for each contender that has a sweep; None where none has."""
    plots = [_sweep_plot(ranked) for ranked in found if any(each.nats and each.lr for each in ranked.result.sweep)]
    return Panels("sweep", TEXTS["sweep"], plots) if plots else None


def _sweep_plot(ranked: Ranked) -> Plot:
    result = ranked.result
    sweep = [outcome for outcome in result.sweep if outcome.lr]
    chosen = {(outcome.share, outcome.lr) for outcome in result.outcomes}
    series, rings = list[Series](), list[Point]()
    for number, share in enumerate(sorted({outcome.share for outcome in sweep if outcome.nats})):
        by_rate: dict[float, list[float]] = {}
        for outcome in sweep:
            if outcome.share == share and outcome.nats and outcome.lr:
                by_rate.setdefault(outcome.lr, []).append(outcome.bits_per_byte)
        points = [(rate, float(np.mean(bits))) for rate, bits in sorted(by_rate.items())]
        series.append(Series(fraction(share), points, LOOKS[number % len(LOOKS)]._replace(marker=".")))
        found = {(share, result.rate)} if share not in result.shares else chosen
        rings += [point for point in points if (share, point[0]) in found]
    top = max(bits for each in series for _, bits in each.points)
    failed = [(outcome.lr, 1.02 * top) for outcome in sweep if not outcome.nats and outcome.lr]
    series += [Series(points=rings, look=Look("ink", "ring", width=0))]
    series += [Series("failed", failed, Look("soft", "x", width=0))] if failed else []
    rates = Axis("learning rate", log=True, named=lambda tick: f"{tick:.2g}".replace("e-0", "e-"))
    return Plot(ranked.name, series, rates, BITS, size=SMALL)
