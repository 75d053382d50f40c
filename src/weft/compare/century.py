"""Comparison in the order of time: what equal compute buys, from counted letters to LLaMA, and the steps in between."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from weft.api.load import load
from weft.compare.config import Budget
from weft.compare.jobs import Comparison, share_text
from weft.compare.multiplier import Curve, Multiplier, factor_text, multiplier
from weft.compare.page import ComparisonPage
from weft.compare.ranking import NOTHING, Ranked
from weft.costs.units import short
from weft.evaluate.abilities.result import Abilities
from weft.evaluate.abilities.tasks import TASKS
from weft.evaluate.minimal_pairs import Accuracy, MinimalPair
from weft.figures.charts import Panels
from weft.figures.page import Section, html_table, mount_point, part
from weft.figures.plot import LOOKS, Axis, Look, Plot, Series, Whisker, whiskers
from weft.figures.prose import prose
from weft.figures.shapes import html_plot, html_plots, plot_data
from weft.figures.tables import WIDTH, Table, text_table, wrap
from weft.progress import bar

TEXTS = prose(__file__)
QUESTIONS = 40  # about abilities, at each distance
MAX_NAMED = 4  # accuracies in the summary; of more, the lowest and the highest
ROW = 44  # units of height per model
MARKERS = ("o", "s", "^", "D", "v")


class Knowledge(NamedTuple):
    """Abilities of a trained contender, and its accuracy on minimal pairs."""

    abilities: Abilities
    grammar: Accuracy | None = None


def measure_knowledge(comparison: Comparison, folder: Path, pairs: Sequence[MinimalPair] = ()) -> dict[str, Knowledge]:
    """Test the abilities of the models with the whole budget, and judge pairs with them."""
    found = {}
    with bar("asking for abilities", len(comparison.contenders)) as advance:
        for result in comparison.contenders:
            kept = [outcome.contender for outcome in result.outcomes if outcome.job.kept]
            if kept and (path := folder / "runs" / kept[0]).is_dir():
                run = load(path)
                grammar = next(iter(run.minimal_pairs(pairs).groups[0].accuracies.values())) if pairs else None
                found[result.name] = Knowledge(run.abilities(questions=QUESTIONS), grammar)
            advance(1)
    return found


@dataclass(frozen=True)
class CenturyPage(ComparisonPage):
    """Page of a comparison whose contenders have years."""

    knowledge: Mapping[str, Knowledge] = field(default_factory=dict)

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"What the same {self._amount} buys"

    @property
    def about(self) -> str:  # type: ignore[override]
        return TEXTS["century"]

    @property
    def _amount(self) -> str:
        return "budget" if self.comparison.flops is None else "compute"

    @cached_property
    def timeline(self) -> list[Ranked]:
        """Contenders that finished, oldest first."""
        return sorted((each for each in self.ranking if each.finished), key=lambda each: each.result.year or 0)

    @cached_property
    def shares(self) -> list[float]:
        return sorted({share for each in self.timeline if not each.is_ngram for share in each.result.shares})

    @cached_property
    def steps(self) -> list[Multiplier | None]:
        """Multiplier of each contender against the one before it; None if one of them is counted."""
        curves = [Curve.of(each.result) for each in self.timeline]
        return [None, *(multiplier(now, before) for before, now in pairwise(curves))]

    @property
    def result(self) -> str:
        """Summary: the first and the last trained contender, and the largest step between neighbours."""
        trained = [each for each in self.timeline if not each.is_ngram]
        if len(trained) < 2:
            return super().result
        first, last = trained[0], trained[-1]
        times = multiplier(Curve.of(last.result), Curve.of(first.result))
        flops = self.comparison.flops
        bought = "The same budget buys" if flops is None else f"{self._budget(1.0)} of compute buy"
        said = f"{bought} {first.bits:.2f} bits per byte with {_named(first)}"
        said += f", and {last.bits:.2f} with {_named(last)}"
        if times is not None:
            slower = last.name if times.value < 1 else first.name
            said += f": {slower} needs {_factor(times)} times the compute for the same loss"
        steps = [(step.value, number) for number, step in enumerate(self.steps) if step is not None]
        value, number = max(steps, default=(0.0, 0))
        if value > 1:
            said += f". The largest step was from {self.timeline[number - 1].name} to {_named(self.timeline[number])}"
        for before, now, step in zip(self.timeline, self.timeline[1:], self.steps[1:], strict=False):
            if step is not None and step.high < 1:
                said += f". {_named(now)} needs {_factor(step)} times the compute of {before.name}"
        if judged := self._judged:
            names = sorted(judged, key=lambda name: judged[name].accuracy)
            ends = zip((names[0], names[-1]), ("fewest", "most"), strict=True)
            found = [f"{judged[name].accuracy:.1%} for {name}" for name in judged]
            if len(found) > MAX_NAMED:
                found = [f"{judged[name].accuracy:.1%} for {name}, the {side}" for name, side in ends]
            said += f". Share of minimal pairs judged right: {'; '.join(found)}"
        return f"{said}."

    def _budget(self, share: float) -> str:
        """Name a share of the budget by its FLOPs; of a budget in tokens or minutes, as a share."""
        flops = self.comparison.flops
        return share_text(share) if flops is None else str(Budget(flops=share * flops))

    def _bits(self, ranked: Ranked, share: float) -> float | None:
        """Return the mean bits per byte at a share of the budget; an n-gram model has one value for all."""
        outcomes = ranked.result.at(1.0 if ranked.is_ngram else share)
        return sum(outcome.bits_per_byte for outcome in outcomes) / len(outcomes) if outcomes else None

    def _step_text(self, number: int) -> str:
        """Say how much compute a contender saves against the one before it."""
        step, ranked = self.steps[number], self.timeline[number]
        if step is not None:
            return f"{self.timeline[number - 1].name} needs {step.text()} as much compute for the same loss"
        if number and not ranked.is_ngram:
            before = self.timeline[number - 1]
            passed = [share for share in self.shares if (bits := self._bits(ranked, share)) and bits < before.bits]
            first = f" from {self._budget(passed[0])} on" if passed and len(self.shares) > 1 else ""
            return f"better than {before.name}{first}" if passed else f"not better than {before.name}"
        return ""

    def century_plot(self) -> Plot:
        """Plot bits per byte in rows, oldest on top; one line per budget, the darkest for the most compute."""
        series = []
        for index, share in enumerate(self.shares):
            shade = f"{40 + round(60 * (index + 1) / len(self.shares))}%"
            trained = [(row, each) for row, each in enumerate(self.timeline) if not each.is_ngram]
            points = [(bits, float(-row)) for row, each in trained if (bits := self._bits(each, share))]
            series.append(Series(self._budget(share), points, Look(shade, MARKERS[index % len(MARKERS)], width=1.0)))
        counted = [(each.bits, float(-row)) for row, each in enumerate(self.timeline) if each.is_ngram]
        series.append(Series("counted, not trained", counted, Look("c1", "D", width=0)))
        names = {}
        for row, each in enumerate(self.timeline):
            gain = "" if (step := self.steps[row]) is None else f" · {_gain(step)}"
            names[float(-row)] = f"{each.result.year}  {each.name}{gain}"
        rows = len(self.timeline)
        y = Axis(ticks=names, includes=(0.8, 0.4 - rows))
        return Plot(
            f"Bits per byte by year, with the same {self._amount}",
            series,
            Axis("← better · bits per byte"),
            y,
            size=(560, 110 + ROW * rows),
        )

    def panels(self) -> list[Panels]:
        rows = []
        for number, step in enumerate(self.steps):
            if step is not None:
                before, now = self.timeline[number - 1].name, self.timeline[number].name
                low, high = (step.value if math.isnan(end) else end for end in (step.low, step.high))
                rows.append(Whisker(f"{step.text()}  {before} → {now}", step.value, low, high, LOOKS[0], step.beyond))
        axis = Axis("times the compute that the predecessor needs · better →", log=True, format="multiple")
        plots = [whiskers("Compute multiplier between neighbours in time", rows, axis, neutral=1.0)] if rows else []
        neighbours = [Panels("neighbours", TEXTS["century-neighbours"], plots)] if plots else []
        judged = [Panels("grammar", TEXTS["century-grammar"], [self.grammar_plot()])] if self._judged else []
        return [Panels("century", self.about, [self.century_plot()]), *judged, *neighbours, *super().panels()]

    def grammar_plot(self) -> Plot:
        """Plot the share of minimal pairs that each contender judges right, oldest on top."""
        rows = [
            Whisker(f"{found.accuracy:.1%}  {name}", found.accuracy, found.low, found.high, LOOKS[0])
            for name, found in self._judged.items()
        ]
        low, high = min(0.5, *(row.low for row in rows)), max(row.high for row in rows)
        tenths = range(math.floor(10 * low), math.ceil(10 * high) + 1)
        axis = Axis("minimal pairs judged right · better →", ticks={tenth / 10: f"{10 * tenth}%" for tenth in tenths})
        plot = whiskers("Grammar, beside chance", rows, axis, neutral=0.5)
        return replace(plot, x=replace(plot.x, includes=(tenths[0] / 10, tenths[-1] / 10)))

    def timeline_table(self) -> Table:
        """Return the contenders in the order of time, with their bits per byte at each budget."""
        header = ("year", "model", "parameters", *map(self._budget, self.shares), "against the one before")
        rows = []
        for number, each in enumerate(self.timeline):
            bits = [self._bits(each, share) for share in self.shares]
            step = self.steps[number]
            shown = [NOTHING if value is None else f"{value:.3f}" for value in bits]
            told = step.text() if step is not None else self._step_text(number)
            rows.append((str(each.result.year), each.name, short(each.mean("parameters")), *shown, told))
        return Table(header, rows, "", [TEXTS["century-counted"]], text=(0, 1, len(header) - 1), spare=(2,))

    def abilities_table(self) -> Table:
        """Return the share of right answers by ability, in the order of time."""
        asked = [each for each in self.timeline if each.name in self.knowledge]
        rows = [("chance", "50%" if self._judged else "", *(f"{task.chance:.0%}" for task in TASKS.values()))]
        for each in asked:
            abilities, grammar = self.knowledge[each.name]
            right = {curve.task.name: curve.overall for curve in abilities.curves}
            cells = [NOTHING if (found := right.get(name)) is None else f"{found.accuracy:.0%}" for name in TASKS]
            judged = "" if grammar is None else f"{grammar.accuracy:.1%}, {grammar.low:.1%}–{grammar.high:.1%}"
            rows.append((each.name, judged, *cells))
        header = ("model", "grammar", *TASKS)
        spare = tuple(range(len(header) - 1, 2, -1))
        return Table(header, rows, "Abilities", [TEXTS["century-abilities"]], text=(0,), spare=spare)

    @property
    def _judged(self) -> dict[str, Accuracy]:
        """Accuracy on minimal pairs by contender, oldest first."""
        known = {each.name: self.knowledge.get(each.name) for each in self.timeline}
        return {name: each.grammar for name, each in known.items() if each is not None and each.grammar is not None}

    def text(self) -> str:
        tables = [self.timeline_table(), *([self.abilities_table()] if self.knowledge else [])]
        return "\n\n".join([*(text_table(table, WIDTH) for table in tables), "\n".join(wrap(self.result))])

    def record(self) -> dict[str, Any]:
        """Return the summary, and the contenders in the order of time with steps and abilities."""
        contenders = []
        for number, each in enumerate(self.timeline):
            step, known = self.steps[number], self.knowledge.get(each.name)
            bits = {self._budget(share): self._bits(each, share) for share in self.shares}
            times = step and {name: getattr(step, name) for name in ("value", "low", "high", "beyond")}
            named: dict[str, Any] = {"year": each.result.year, "bits": bits, "against_previous": times}
            if known is not None:
                named |= {"grammar": known.grammar and known.grammar._asdict(), **known.abilities.record()}
            contenders.append({**each.record(), **named})
        return {"result": self.result, "contenders": contenders}

    def cards(self) -> list[dict[str, Any]]:
        """Return what the page says of each contender, for web/century.js."""
        cards = []
        for number, each in enumerate(self.timeline):
            facts = [(self._budget(share), self._bits(each, share)) for share in self.shares]
            rows = (
                []
                if each.is_ngram
                else [(name, f"{bits:.3f} bits per byte") for name, bits in facts if bits is not None]
            )
            rows = rows or [("whole text", f"{each.bits:.3f} bits per byte")]
            rows += [("step", said)] if (said := self._step_text(number)) else []
            name = f"{each.result.year}  {each.name}"
            cards.append({"title": name, "about": each.result.about, "rows": rows, "sample": each.sample})
        return cards

    def data(self) -> dict[str, Any]:
        shared, table = super().data(), self.timeline_table()
        tables = [table, *([self.abilities_table()] if self.knowledge else [])]
        return {**shared, "result": self.result, "tables": [*(each._asdict() for each in tables), *shared["tables"]]}

    def sections(self) -> list[Section]:
        plot, cards = self.century_plot(), self.cards()
        drawn = html_plot(plot)
        stepped = mount_point("century.js", {"plot": plot_data(plot), "cards": cards}, drawn)
        first = Section("", "", stepped + part("lead", self.result), ("century.js",))
        titles = {"grammar": "Grammar", "neighbours": "From one to the next"}
        sections = [
            Section(titles[each.name], each.about, html_plots(list(each.plots)), ("chart.js",))
            for each in self.panels()
            if each.name in titles
        ]
        sections = [first, *sections, Section("In numbers", "", html_table(self.timeline_table(), cards=True))]
        if self.knowledge:
            table = self.abilities_table()._replace(title="")
            sections.append(Section("Abilities", "", html_table(table, cards=True)))
        result, *rest, notes = ComparisonPage(self.comparison).sections()
        counted = [TEXTS["century-counted"]] if any(each.is_ngram for each in self.timeline) else []
        extra = part("notes", [TEXTS["century-marks"], *counted])
        return [*sections, *rest, notes._replace(html=extra + notes.html), result._replace(title="Text and machine")]


def _gain(step: Multiplier) -> str:
    """Say in a few words how much less compute is needed than before, or how much more."""
    if step.low <= 1 <= step.high:
        return "no clear difference"
    word = "less" if step.value > 1 else "more"
    return f"{_factor(step)}× {word} compute"


def _factor(step: Multiplier) -> str:
    """Format the multiplier, or its inverse where that is larger."""
    return f"{'more than ' if step.beyond else ''}{factor_text(max(step.value, 1 / step.value))}"


def _named(ranked: Ranked) -> str:
    return f"{ranked.name} ({ranked.result.year})"
