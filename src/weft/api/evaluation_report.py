"""What `weft evaluate` tells of a run: its metrics with what they are made of, as tables and as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.api.load import load
from weft.api.run import Run
from weft.data.rows import MissingColumnError
from weft.errors import ConfigError, DataError, RunError, counted
from weft.evaluate.details import Details
from weft.evaluate.overlap import QUICK_BYTES, Overlap, overlap_tables
from weft.figures.tables import Table
from weft.recipe.metrics import against_baseline, metric

BASELINE = "baseline_bits_per_byte"
UNITS = {
    "loss": "nats per token",
    "perplexity": "of the next token",
    "bits_per_byte": "of UTF-8 text; bytes that no token spells, such as unknown words, count 8 bits each",
    "bits_per_character": "of the same text",
    "unknown_share": "of all tokens",
    BASELINE: "bits per byte of character frequencies alone",
}


@dataclass(frozen=True)
class Wanted:
    """The options of `weft evaluate`, by their names there; `data` is None for what the run held out."""

    data: Sequence[str] | None = None
    targets: Sequence[str] = ()
    stride: int | None = None
    encoding: str = "utf-8"
    figure: Path | None = None
    quantize: str | None = None
    details: bool = False
    overlap: bool = False
    out: Path | None = None

    def check(self, run: Run) -> None:
        """Refuse what this run's objective has no answer to."""
        objective = run.config.objective
        if self.targets and objective.reads != "rows":
            raise ConfigError(f"--targets {self.targets[0]}: this run is {objective.makes}, which reads text alone")
        if self.figure is not None and not hasattr(objective, "labels"):
            raise ConfigError(f"--figure {self.figure}: this run is {objective.makes}, which has no confusion matrix")
        given = {f"--quantize {self.quantize}": self.quantize, "--details": self.details, "--overlap": self.overlap}
        for option, value in {**given, f"--out {self.out}": self.out}.items():
            if value and not (objective.continues and objective.reads == "text"):
                raise ConfigError(f"{option}: this run is {objective.makes}, and that is for language models")


@dataclass(frozen=True)
class EvaluationReport:
    """The metrics by the width of the weights ("" where measured as trained alone), and what else was found."""

    measured: Mapping[str, Mapping[str, Any]]
    details: Details | None
    overlap: Overlap | None
    unchecked: int  # bytes that would have to be read to look for an overlap that was not looked for

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Of the weights as trained."""
        return next(iter(self.measured.values()))

    def tables(self, details: bool = True) -> list[Table]:
        """The metrics, a classifier's confusion matrix, the details, and the passages that were trained on."""
        tables = [self.metrics_table()]
        if "matrix" in self.metrics:
            labels, matrix = self.metrics["labels"], self.metrics["matrix"]
            counts = [(label, *(f"{n:,}" for n in row)) for label, row in zip(labels, matrix, strict=True)]
            tables.append(Table(("actual ↓  predicted →", *labels), counts, ""))
        tables += self.details.tables() if details and self.details is not None else []
        return tables + ([] if self.overlap is None else overlap_tables(self.overlap))

    def metrics_table(self) -> Table:
        """The metrics with their intervals, or with what narrower weights cost."""
        first, last = self.metrics, list(self.measured.values())[-1]
        several, text = len(self.measured) > 1, "bits_per_byte" in first
        intervals = {} if several else first.get("intervals", {})
        rows = []
        for key, value in first.items():
            if isinstance(value, float):
                shown = ".4%" if metric(key).format.endswith("%") else ".4f"
                cells = [format(metrics[key], shown) for metrics in self.measured.values() if key in metrics]
                if several and key in last and value:
                    cells.append(f"{last[key] / value - 1:+.2%}")
                elif key in intervals:
                    cells.append("–".join(format(end, shown) for end in intervals[key]))
                title = "baseline" if key == BASELINE else metric(key).title  # what it is stands beside the value
                rows.append([title, *cells, UNITS.get(key, "") if text else ""])
            elif isinstance(value, str):
                rows.append([key.replace("_", " "), value, ""])
        if text:
            rows.append(["tokens", f"{first['tokens']:,}", f"each scored once; {counted(first['bytes'], 'byte')}"])
        names = ["", *self.measured, *(["cost"] if several else ["95 % interval"] if intervals else []), ""]
        filled = [[*row[:-1], *[""] * (len(names) - len(row)), row[-1]] for row in rows]
        return Table(names, filled, "", self._remarks(), (0, len(names) - 1))

    def _remarks(self) -> list[str]:
        if "rows" in self.metrics:
            several = self.metrics["intervals"] and len(self.measured) == 1
            about = [f"Intervals: a bootstrap over {self.metrics['rows']:,} rows."] if several else []
            return [*about, *filter(None, [against_baseline(self.metrics)])]
        if "sections" not in self.metrics:
            return []
        sections = self.metrics["sections"]
        why = "a single section" if sections == 1 else "impossible to the model"
        several = f"Intervals: a bootstrap over {sections:,} sections of the text."
        lines = [several if self.metrics["intervals"] else f"No intervals: the text is {why}."]
        if self.overlap is not None:
            lines.append(f"Overlap: {self.overlap.line}.")
        elif self.unchecked:
            size = f"{self.unchecked / 1e6:,.0f} MB"
            lines.append(f"Overlap with the training text: not looked for; --overlap reads {size} for it.")
        return lines

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dict(self.metrics)
        for width, metrics in list(self.measured.items())[1:]:
            values[width] = {key: value for key, value in metrics.items() if isinstance(value, float)}
        if (shared := self.overlap) is not None:
            kept = {key: value for key, value in vars(shared).items() if key not in ("unit", "longest")}
            longest = [each._asdict() for each in shared.longest]
            values["overlap"] = {"unit": str(shared.unit), "share": shared.share, **kept, "longest": longest}
        if self.details is not None:
            rows = {"by_position": self.details.positions, "by_frequency": self.details.frequencies}
            values |= {name: [{**each._asdict(), "loss": each.loss} for each in few] for name, few in rows.items()}
            values["passages"] = [each._asdict() for each in self.details.passages]
        return values


def evaluation_report(run: Run, wanted: Wanted) -> EvaluationReport:
    """Measure a run. Short texts are looked for in the training text even where that is not asked for."""
    wanted.check(run)
    shared, found = None, None
    try:
        with run.evaluation(wanted.data, wanted.targets, wanted.encoding) as text:
            if wanted.details or wanted.out is not None:
                found = text.details(wanted.stride)
            metrics = text.metrics(wanted.stride) if found is None else dict(found.metrics)
            unchecked = text.compared_bytes or 0
            if wanted.overlap or 0 < unchecked <= QUICK_BYTES:
                try:
                    shared, unchecked = text.overlap(), 0
                except RunError:  # its training text is damaged, which need not concern another text
                    if wanted.overlap:
                        raise
    except MissingColumnError as error:
        raise DataError(f"{error.line}; this run reads '{error.column}', so rename the column") from None
    baseline = run.results().get(BASELINE) if wanted.data is None else None  # known for the run's own text
    metrics |= {} if baseline is None else {BASELINE: baseline}
    measured, width = {"": metrics}, wanted.quantize
    if width == "auto":
        width = load(run.path, quantize=width).quantized  # says which, and why
    if width is not None:
        run.quantize(width)
        smaller = run.evaluate(wanted.data, stride=wanted.stride, encoding=wanted.encoding)
        measured = {"as trained": metrics, width: smaller}
    return EvaluationReport(measured, found, shared, unchecked)
