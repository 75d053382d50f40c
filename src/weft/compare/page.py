"""Show a comparison: on one page, in the terminal, and as figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import inf, isnan
from typing import Any

import numpy as np
from markupsafe import Markup

from weft.compare.jobs import Comparison, Outcome, fraction
from weft.compare.multiplier import BEYOND
from weft.compare.ranking import NOTHING, Effect, Ranked, flops_text, main_effects, method, ranking, result, warnings
from weft.costs.units import plain, short
from weft.figures.charts import Panels, PanelsPage
from weft.figures.formats import Format
from weft.figures.page import Section, html_table, html_tables, mount_point, part
from weft.figures.plot import LOOKS, Axis, Look, Plot, Point, Series, Whisker, whiskers
from weft.figures.prose import prose
from weft.figures.shapes import html_plots, plot_data
from weft.figures.tables import WIDTH, Table, text_table, wrap

TEXTS = prose(__file__)
MAX_OPEN = 6  # more small charts or samples than this are folded
AMOUNTS: dict[str, tuple[str, Format]] = {  # field of an outcome → its title and axis format
    "flops": ("FLOPs", "scientific"),
    "tokens": ("tokens", "number"),
    "steps": ("steps", "number"),
    "seconds": ("seconds", "number"),
}
BITS = Axis("bits per byte", log=True, pad=0.08)
BASELINE, FAINT = Look("ink", "o"), Look("soft", ".", width=0.9)
DISTANCE, INTERVAL = Look("ink", "|", width=1.2), Look("ink", "|", width=4)
SMALL = (320, 240)


@dataclass(frozen=True)
class ComparisonPage(PanelsPage):
    """Page of a comparison; intervals are resampled only once."""

    comparison: Comparison

    @property
    def about(self) -> str:  # type: ignore[override]
        return TEXTS["comparison"]

    @property
    def title(self) -> str:  # type: ignore[override]
        return self.comparison.title

    @property
    def result(self) -> str:
        """Summary: the best contender, and by how much, in a few sentences."""
        return result(self.ranking)

    @cached_property
    def ranking(self) -> tuple[Ranked, ...]:
        return ranking(self.comparison)

    @cached_property
    def effects(self) -> list[Effect]:
        varied = self.comparison.varied
        return main_effects(self.comparison.contenders, varied) if varied else []

    def panels(self) -> list[Panels]:
        # an ablation at a single share of the budget has no curves
        single = all(len(ranked.result.shares) <= 1 for ranked in self.ranking)
        losses = [] if self.comparison.varied and single else loss_charts(self.ranking)
        charts = [ranking_chart(self.ranking), multiplier_chart(self.ranking), effects_chart(self.effects)]
        return [*losses, *filter(None, [*charts, sweep_charts(self.ranking)])]

    def text(self) -> str:
        tables = [ranking_table(self.ranking), *([effects_table(self.effects)] if self.effects else [])]
        paragraphs = ["\n".join(wrap(text)) for text in (self.result, *warnings(self.ranking))]
        return "\n\n".join([*(text_table(table, WIDTH) for table in tables), *paragraphs])

    def record(self) -> dict[str, Any]:
        """Return the summary, and a record for each contender, best first."""
        return {"result": self.result, "contenders": [ranked.record() for ranked in self.ranking]}

    def data(self) -> dict[str, Any]:
        """Return the page's texts, tables and charts as values, for the Explorer."""
        comparison = self.comparison
        rows = [[ranked.name, *_cells(ranked).values()] for ranked in self.ranking]
        tables = [Table(("contender", *COLUMNS), rows, "Contenders", [TEXTS["contenders"]])]
        tables += [effects_table(self.effects)] if self.effects else []
        texts = {"kind": "compare", "title": self.title, "about": self.about, "result": self.result}
        shared = study_data(self.panels(), tables, method(comparison, self.ranking))
        contenders = [{key: getattr(ranked, key) for key in ("name", "differs", "sample")} for ranked in self.ranking]
        source = {"facts": comparison.facts, "command": comparison.command}
        return {**texts, **shared, "contenders": contenders, **source}

    def sections(self) -> list[Section]:
        ranking, comparison = self.ranking, self.comparison
        first = result_section(self.result, comparison.facts, comparison.command)
        sections = [first, Section("Contenders", TEXTS["contenders"], html_ranking(ranking))]
        titles = {"ranking": "Ranking", "multipliers": "Compute multipliers"}
        titles |= {"effects": "Main effects", "sweep": "Learning rates"}
        for title, group in groupby(self.panels(), lambda panels: titles.get(panels.name, "Loss against cost")):
            charts = list(group)
            plots = [plot for panels in charts for plot in panels.plots]
            html = html_plots(plots, "small" if title == titles["sweep"] else "")
            if title == titles["sweep"] and len(plots) > MAX_OPEN:
                html = part("fold", f"{len(plots)} charts", html)
            elif title == titles["effects"]:
                html += html_tables([effects_table(self.effects), grid_table(ranking, comparison.varied or {})])
            sections.append(Section(title, charts[0].about, html, ("chart.js",)))
        return [*sections, Section("Method", "", part("notes", method(comparison, ranking)))]


def study_data(panels: Sequence[Panels], tables: Sequence[Table], notes: Sequence[str]) -> dict[str, Any]:
    """Return the data that comparisons and scaling laws have in common."""
    charts = [{"name": p.name, "about": p.about, "plots": [plot_data(plot) for plot in p.plots]} for p in panels]
    return {"panels": charts, "tables": [table._asdict() for table in tables], "notes": list(notes)}


def result_section(result: str, facts: Mapping[str, str], command: str) -> Section:
    """Return the first section of a page: the summary, the facts, and the command that repeats the study."""
    html = part("lead", result) + part("facts", facts) + mount_point("command.js", command, part("command", command))
    return Section("Result", "", html, ("command.js",))


COLUMNS: dict[str, Callable[[Ranked], str]] = {  # columns of the table of contenders
    "parameters": lambda ranked: short(ranked.mean("parameters")),
    "tokens": lambda ranked: short(ranked.mean("tokens")),
    "FLOPs": lambda ranked: flops_text(ranked.mean("flops")),
    "seconds": lambda ranked: plain(ranked.mean("seconds")),
    "bits per byte": lambda ranked: f"{ranked.bits:.3f}",
    "95% interval": lambda ranked: "–".join(f"{end:.3f}" for end in ranked.bounds),
    "rate": lambda ranked: NOTHING if ranked.result.rate is None else f"{ranked.result.rate:.2g}",
    "multiplier": Ranked.multiplier_text,
}


def _cells(ranked: Ranked) -> dict[str, str]:
    if not ranked.finished:
        return dict.fromkeys(COLUMNS, NOTHING) | {"multiplier": "failed"}
    return {name: cell(ranked) for name, cell in COLUMNS.items()}


def ranking_table(contenders: Sequence[Ranked]) -> Table:
    """Return the contenders, best first, for a terminal of 80 columns."""
    header = ("contender", "parameters", "FLOPs", "bits per byte", "rate", "multiplier")
    rows = []
    for ranked in contenders:
        cells = _cells(ranked) | ({"bits per byte": ranked.bits_text()} if ranked.finished else {})
        rows.append((ranked.name, *(cells[column].replace(BEYOND, "0–∞") for column in header[1:])))
    return Table(header, rows)


def html_ranking(contenders: Sequence[Ranked]) -> Markup:
    """Render the contenders, best first, as cards on a narrow page, and below them a sample of each."""
    rows = [[part("named", ranked.name, ranked.differs), *_cells(ranked).values()] for ranked in contenders]
    marked = [number for number, ranked in enumerate(contenders) if ranked.baseline]
    table = Table(("contender", *COLUMNS), rows)
    samples = [part("fold", f"Sample of {r.name}", part("texts", [r.sample])) for r in contenders if r.sample]
    html = Markup("").join(samples) if len(samples) <= MAX_OPEN else part("fold", "Samples", Markup("").join(samples))
    return html_table(table, row_names=True, cards=True, marked=marked) + html


def effects_table(effects: Sequence[Effect]) -> Table:
    """Return the main effects, with the number of pairs, and of planned pairs if some failed."""
    rows = []
    for effect in effects:
        pairs = str(effect.pairs) if effect.pairs == effect.planned else f"{effect.pairs} of {effect.planned}"
        rows.append((effect.name, f"{effect.difference:+.4f}", f"{effect.low:+.4f} to {effect.high:+.4f}", pairs))
    return Table(("setting", "bits per byte", "95% interval", "pairs"), rows, "Main effects", [TEXTS["effect"]])


def grid_table(contenders: Sequence[Ranked], varied: Mapping[str, tuple[str, ...]]) -> Table:
    """Return every trained combination of an ablation, best first."""
    rows = [
        (*(levels.get(setting, NOTHING) for setting in varied), ranked.bits_text(), ranked.multiplier_text())
        for ranked in contenders
        if (levels := ranked.result.levels) is not None
    ]
    return Table((*varied, "bits per byte", "multiplier"), rows, "All combinations", text=range(len(varied)))


def looks(contenders: Sequence[Ranked]) -> dict[str, Look]:
    """Return the look of each contender: the baseline in ink, the best four others in colour, the rest in grey."""
    others = [ranked.name for ranked in contenders if not ranked.baseline and ranked.finished]
    chosen = {name: LOOKS[number] if number < len(LOOKS) else FAINT for number, name in enumerate(others)}
    return chosen | {ranked.name: BASELINE for ranked in contenders if ranked.baseline}


def loss_charts(contenders: Sequence[Ranked]) -> list[Panels]:
    """Plot bits per byte against FLOPs, tokens, steps and seconds."""
    done = [ranked for ranked in contenders if ranked.finished]
    chosen = looks(done)
    grey = [name for name, look in chosen.items() if look is FAINT]
    others = grey if len(grey) < 2 else [f"{len(grey)} others"]
    charts = []
    for amount, (title, number_format) in AMOUNTS.items():
        if any(ranked.mean(amount) > 0 for ranked in done):
            series = [line for ranked in done for line in _loss_series(ranked, amount, chosen[ranked.name])]
            series.sort(key=lambda line: bool(line.name))  # named series are drawn on top
            distance = _distance_series(done) if amount == "flops" else []
            series += [*(Series(name, look=FAINT) for name in others), *distance]
            height = 330 + 17 * sum(len(line.name) > 30 for line in series)  # long names take a line in the legend
            axis = Axis(f"{title} in training", log=True, format=number_format, pad=0.06)
            plot = Plot(f"Bits per byte against {title}", series, axis, BITS, size=(480, height))
            text = f"{TEXTS['loss']} {TEXTS['distance']}" if distance else TEXTS["loss"]
            charts.append(Panels(f"loss-{amount}", text, [plot]))
    return charts


def _distance_series(contenders: Sequence[Ranked]) -> list[Series]:
    """Return the best multiplier as a horizontal line at its loss, from the contender's curve to the baseline's."""
    best = next((ranked for ranked in contenders if not ranked.baseline and ranked.multiplier), None)
    if best is None or (times := best.multiplier) is None or times.beyond:  # the curves reach no common loss
        return []
    start = times.share * best.mean("flops")
    line = Series(f"{times.text()} for {best.name}", [(start, times.loss), (times.value * start, times.loss)], DISTANCE)
    ends = [(end * start, times.loss) for end in (times.low, times.high)]
    bounded = all(0 < end < inf for end, _ in ends)  # NaN with one seed
    return [line, *([Series(points=ends, look=INTERVAL)] if bounded else [])]


def _loss_series(ranked: Ranked, amount: str, look: Look) -> list[Series]:
    """Return a line through the shares of the budget, or a horizontal line for a contender without that cost."""
    rungs = [ranked.result.at(share) for share in ranked.result.shares]
    amounts = [float(np.mean([getattr(outcome, amount) for outcome in rung])) for rung in rungs]
    bits = [[outcome.bits_per_byte for outcome in rung] for rung in rungs]
    if not max(amounts):
        return [Series(ranked.name, look=look._replace(marker=""), level=ranked.bits)]
    means = [(cost, float(np.mean(seeds))) for cost, seeds in zip(amounts, bits, strict=True)]
    if look is FAINT:
        return [Series(points=means, look=look)]
    faint = [Series(points=_progress(rung[0], amount), look=Look(look.colour), background=True) for rung in rungs]
    return [*faint, Series(ranked.name, means, look, [(min(seeds), max(seeds)) for seeds in bits])]


def _progress(outcome: Outcome, amount: str) -> list[Point]:
    """Return the evaluations during training; FLOPs, steps and seconds are proportional to tokens."""
    total = getattr(outcome, amount)
    per_token = total / outcome.tokens if outcome.tokens else 0.0
    points = [(tokens * per_token, bits) for tokens, bits in outcome.progress if 0 < tokens < outcome.tokens]
    return [*points, (total, outcome.bits_per_byte)]


def ranking_chart(contenders: Sequence[Ranked]) -> Panels | None:
    """Plot the bits per byte of each contender that finished, best on top; None if none did."""
    done, chosen = [ranked for ranked in contenders if ranked.finished], looks(contenders)
    if not done:
        return None
    base = next((ranked for ranked in done if ranked.baseline), done[0])
    rows = [Whisker(f"{r.bits_text()}  {r.name}", r.bits, *r.bounds, chosen[r.name]._replace(width=0)) for r in done]
    axis = replace(BITS, label="← better · bits per byte", log=False)
    plots = [whiskers("Bits per byte", rows, axis, neutral=base.bits)]
    return Panels("ranking", TEXTS["ranking"].format(base=base.name), plots)


def multiplier_chart(contenders: Sequence[Ranked]) -> Panels | None:
    """Plot the multipliers of the contenders; None if none has one."""
    chosen = looks(contenders)
    rows = []
    for r in contenders:
        if times := r.multiplier:
            low, high = (times.value if isnan(end) else end for end in (times.low, times.high))
            rows.append(Whisker(f"{times.text()}  {r.name}", times.value, low, high, chosen[r.name], times.beyond))
    if not rows:
        return None
    base = next(ranked.name for ranked in contenders if ranked.baseline)
    axis = Axis("compute multiplier · better →", log=True, format="multiple")
    plots = [whiskers(f"Compute multiplier against {base}", rows, axis, neutral=1.0)]
    return Panels("multipliers", TEXTS["multipliers"].format(base=base), plots)


def effects_chart(effects: Sequence[Effect]) -> Panels | None:
    """Plot the main effect of every value of a setting against its base; None if there are none."""
    if not effects:
        return None
    rows = []
    for effect in effects:  # coloured as better, worse, or neither if the interval includes zero
        unclear, change = effect.low <= 0 <= effect.high, effect.difference
        look = Look("soft", "o") if unclear else LOOKS[0] if change < 0 else LOOKS[1]
        rows.append(Whisker(f"{change:+.3f}  {effect.name}", change, effect.low, effect.high, look))
    axis = Axis("← better · change in bits per byte · worse →", format="signed")
    return Panels("effects", TEXTS["effects"], [whiskers("Main effects", rows, axis, neutral=0.0)])


def sweep_charts(contenders: Sequence[Ranked]) -> Panels | None:
    """Plot loss against learning rate, a small chart per contender with a sweep; None if none has one."""
    plots = [_sweep_plot(ranked) for ranked in contenders if any(o.nats and o.lr for o in ranked.result.sweep)]
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
        marked = {(share, result.rate)} if share not in result.shares else chosen
        rings += [point for point in points if (share, point[0]) in marked]
    top = max(bits for line in series for _, bits in line.points)
    failed = [(outcome.lr, 1.02 * top) for outcome in sweep if not outcome.nats and outcome.lr]
    series += [Series(points=rings, look=Look("ink", "ring", width=0))]
    series += [Series("failed", failed, Look("soft", "x", width=0))] if failed else []
    return Plot(ranked.name, series, Axis("learning rate", log=True), BITS, size=SMALL)
