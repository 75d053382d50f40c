"""A scaling law on one page: what was trained, the fit through it, and whether it predicted the next rung.

L(N, D) = E + A/N^α + B/D^β for N parameters and D tokens (Hoffmann et al. 2022, §3.3).
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from matplotlib.figure import Figure

from weft.compare.drawing import Drawing, html_charts, html_notes, html_top
from weft.compare.fit import Fit
from weft.compare.scaling_charts import (
    Check,
    Rung,
    by_size,
    loss_chart,
    optimum_chart,
    residual,
    residual_chart,
    runs_chart,
)
from weft.compare.standings import flops_text
from weft.costs.units import short
from weft.figures.page import Section
from weft.figures.picture import Picture
from weft.figures.tables import WIDTH, Table, html_tables, text_tables

CONSTANTS = {
    "E": "loss that no size and no text removes",
    "A": "weight of the size",
    "B": "weight of the text",
    "alpha": "how fast the loss falls with parameters",
    "beta": "how fast the loss falls with tokens",
}


@dataclass(frozen=True)
class ScalingPage(Picture):
    """A fit, the points it goes through, and the next rung, which it had not seen.

    `budget` is a larger one, in FLOPs, for which the optimal size is asked, and `optimum` its parameters and tokens
    where FLOPs are counted otherwise than 6ND. `unit` is that of all losses.
    """

    fit: Fit
    points: Sequence[Rung]
    check: Check | None = None
    budget: float | None = None
    optimum: tuple[float, float] | None = None
    title: str = "Scaling law"
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unit: str = "bits per byte"
    about: str = (
        "L(N, D) = E + A/Nᵅ + B/Dᵝ: the loss of a model with N parameters after D tokens (Hoffmann et al. 2022), fitted"
        " to small training runs in order to choose the size of a large one."
    )
    scripts: ClassVar[tuple[str, ...]] = ("compare.js",)

    @property
    def result(self) -> str:
        """What the law says, and whether it held, in two sentences."""
        fit = self.fit
        share = fit.beta / (fit.alpha + fit.beta)  # N ∝ C^share, D ∝ C^(1 − share)
        told = f"The optimal size grows with C^{share:.2f} and the tokens with C^{1 - share:.2f} of the budget C."
        if self.budget:
            size, tokens = self.optimum or self.fit.optimal(self.budget)
            low, high = self.fit.optimal_interval(self.budget)
            bounds = (
                f"{short(low)}–{short(high)}" if low > 1 and high < 0.99 * self.budget / 6 else "the runs hardly tell"
            )
            told += (
                f" For {flops_text(self.budget)} FLOPs it is {short(size)} parameters ({bounds}), trained on"
                f" {short(tokens)} tokens."
            )
        if self.check:
            word = "inside" if self.check.holds else "outside"
            told += (
                f" The next rung, which was not fitted, was predicted at {self.check.predicted:.3f} {self.unit} and"
                f" measured at {self.check.measured.loss:.3f}: {abs(self.check.error):.1%} off, {word} the interval"
                f" ({self.check.low:.3f}–{self.check.high:.3f})."
            )
        return told

    def drawings(self) -> list[Drawing]:
        """All charts, in reading order."""
        return [
            loss_chart(self.fit, self.points, self.check, self.unit),
            optimum_chart(self.fit, self.points, self.budget),
            runs_chart(self.fit, self.points, self.check),
            residual_chart(self.fit, self.points, self.unit),
        ]

    def figure(self) -> Figure:
        """The first chart."""
        return self.drawings()[0].figure()

    def tables(self) -> list[Table]:
        """The constants, and the points by size."""
        return [self._constants(), self._runs()]

    def record(self) -> dict[str, Any]:
        """The same as values: the constants with their intervals, the runs, and the next rung."""
        fit = self.fit
        constants = {name: [getattr(fit, name), *fit.intervals[name]] for name in CONSTANTS}
        check = None
        if self.check:
            check = {**self.check.measured._asdict(), "predicted": self.check.predicted}
            check |= {"low": self.check.low, "high": self.check.high}
        runs = [rung._asdict() for rung in self.points]
        return {"result": self.result, "constants": constants, "runs": runs, "next": check}

    def text(self) -> str:
        """The tables and the result, in 80 columns."""
        told = textwrap.fill(self.result, WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"{text_tables(self.tables())}\n\n{told}"

    def sections(self) -> list[Section]:
        """From the result to how it was fitted."""
        top = html_top(self.result, self.facts, self.command)
        sections = [Section("The result", "", top, self.scripts)]
        loss, optimum, runs, left = self.drawings()
        sections += [
            Section("The law", f"{loss.about} {optimum.about}", html_charts([loss, optimum])),
            Section("What it stands on", f"{runs.about} {left.about}", html_charts([runs, left])),
        ]
        sections.append(Section("In numbers", "", html_tables(self.tables())))
        return [*sections, Section("How it was fitted", "", html_notes([*METHOD, *self.notes]))]

    def _constants(self) -> Table:
        rows = []
        for name, meaning in CONSTANTS.items():
            low, high = self.fit.intervals[name]
            symbol = {"alpha": "α", "beta": "β"}.get(name, name)
            rows.append((symbol, meaning, f"{getattr(self.fit, name):.4g}", f"{low:.4g}–{high:.4g}"))
        return Table(("constant", "what it is", "value", "95 % interval"), rows, "The fit", text=(0, 1))

    def _runs(self) -> Table:
        rows = [
            (
                short(run.parameters),
                short(run.tokens),
                flops_text(run.flops),
                f"{run.loss:.4f}",
                f"{self.fit.predict(run.parameters, run.tokens):.4f}",
                f"{residual(self.fit, run):+.2%}",
            )
            for runs in by_size(self.points).values()
            for run in runs
        ]
        header = ("parameters", "tokens", "FLOPs", f"{self.unit}", "fit", "residual")
        return Table(header, rows, "The training runs that were fitted", text=())


METHOD = (
    "The constants minimise the Huber loss (δ = 0.001) between the logarithms of measured and predicted loss, from many"
    " starting points (Hoffmann et al. 2022, §3.3).",
    "An interval holds 95 % of bootstrap draws: the fit is repeated on training runs drawn with replacement, those of"
    " one size and length together. The interval of a prediction has the scatter of the training runs besides.",
    "The optimal size minimises the fit for a budget of C = 6·N·D operations.",
    "Only the smaller rungs are fitted. The next rung is trained afterwards, to see whether the fit predicts it.",
)
