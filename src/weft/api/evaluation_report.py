"""The report of `weft evaluate`: a run's metrics and their details, as tables and as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.api.load import load
from weft.api.run import Run
from weft.data.rows import MissingColumnError
from weft.errors import ConfigError, DataError, RunError, counted
from weft.evaluate.details import Details
from weft.evaluate.overlap import QUICK_BYTES, Overlap, overlap_tables
from weft.figures.formats import fixed
from weft.figures.tables import Table
from weft.recipe.metrics import against_baseline, metric

BASELINE = "baseline_bits_per_byte"
WITHOUT_BASELINE = "it is unfinished or imported, or its text was no longer there when training ended"
UNITS = {
    "loss": "nats per token",
    "perplexity": "of the next token",
    "bits_per_byte": "of UTF-8 text; bytes that no token spells, such as unknown words, count 8 bits each",
    "bits_per_character": "of the same text",
    "unknown_share": "of all tokens",
    BASELINE: "bits per byte of character frequencies alone",
}


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics by the width of the weights ("" if measured only as trained), details and overlap."""

    measured: Mapping[str, Mapping[str, Any]]
    details: Details | None
    overlap: Overlap | None
    unchecked: int  # bytes to read for an overlap that was not computed
    no_baseline: str | None = None  # why a language model's metrics have no baseline

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics of the weights as trained."""
        return next(iter(self.measured.values()))

    def tables(self, details: bool = True) -> list[Table]:
        """Return tables of the metrics, a confusion matrix, the details, and passages found in the training text."""
        tables = [self.metrics_table()]
        if "matrix" in self.metrics:
            labels, matrix = self.metrics["labels"], self.metrics["matrix"]
            counts = [(label, *(f"{n:,}" for n in row)) for label, row in zip(labels, matrix, strict=True)]
            tables.append(Table(("actual ↓  predicted →", *labels), counts, ""))
        tables += self.details.tables() if details and self.details is not None else []
        return tables + ([] if self.overlap is None else overlap_tables(self.overlap))

    def metrics_table(self) -> Table:
        """Return a table of the metrics with their intervals, or with the cost of narrower weights."""
        first, last = self.metrics, list(self.measured.values())[-1]
        several, text = len(self.measured) > 1, "bits_per_byte" in first
        intervals = {} if several else first.get("intervals", {})
        rows = []
        for key, value in first.items():
            if isinstance(value, float):
                shown = ".4%" if metric(key).format.endswith("%") else ".4f"
                cells = [fixed(metrics[key], shown) for metrics in self.measured.values() if key in metrics]
                if several and key in last and value:
                    cells.append(f"{last[key] / value - 1:+.2%}")
                elif key in intervals:
                    cells.append("–".join(fixed(end, shown) for end in intervals[key]))
                title = "baseline" if key == BASELINE else metric(key).title  # its unit describes it
                rows.append([title, *cells, UNITS.get(key, "") if text else ""])
            elif isinstance(value, str):
                rows.append([key.replace("_", " "), value, ""])
        if text:
            rows.append(["tokens", f"{first['tokens']:,}", f"each scored once; {counted(first['bytes'], 'byte')}"])
        names = ["", *self.measured, *(["cost"] if several else ["95% interval"] if intervals else []), ""]
        filled = [[*row[:-1], *[""] * (len(names) - len(row)), row[-1]] for row in rows]
        return Table(names, filled, "", self._remarks(), (0, len(names) - 1))

    def _remarks(self) -> list[str]:
        if "rows" in self.metrics:
            several = self.metrics["intervals"] and len(self.measured) == 1
            intervals = [f"Intervals: a bootstrap over {self.metrics['rows']:,} rows."] if several else []
            return [*intervals, *filter(None, [against_baseline(self.metrics)])]
        if "sections" not in self.metrics:
            return []
        sections = self.metrics["sections"]
        why = "a single section" if sections == 1 else "impossible according to the model"
        several = f"Intervals: a bootstrap over {sections:,} sections of the text."
        lines = [several if self.metrics["intervals"] else f"No intervals: the text is {why}."]
        if self.overlap is not None:
            lines.append(f"Overlap: {self.overlap.line}.")
        elif self.unchecked:
            size = f"{self.unchecked / 1e6:,.0f} MB"
            lines.append(f"Overlap with the training text: not computed; --overlap reads {size} to find it.")
        return lines

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = dict(self.metrics)
        if self.no_baseline is not None:
            values["no_baseline"] = self.no_baseline
        for width, metrics in list(self.measured.items())[1:]:
            values[width] = {key: value for key, value in metrics.items() if isinstance(value, float)}
        if (overlap := self.overlap) is not None:
            facts = {key: value for key, value in vars(overlap).items() if key not in ("unit", "longest")}
            longest = [passage._asdict() for passage in overlap.longest]
            values["overlap"] = {"unit": str(overlap.unit), "share": overlap.share, **facts, "longest": longest}
        if self.details is not None:
            tables = {"by_position": self.details.positions, "by_frequency": self.details.frequencies}
            for name, buckets in tables.items():
                values[name] = [{**bucket._asdict(), "loss": bucket.loss} for bucket in buckets]
            values["passages"] = [passage._asdict() for passage in self.details.passages]
        return values


def check_options(run: Run, options: Mapping[str, Any]) -> None:
    """Refuse options of `weft evaluate`, by their names there, that do not apply to a run's objective."""
    objective = run.config.objective
    is_language_model = objective.continues and objective.reads == "text"
    reasons = {
        "--targets": objective.reads != "rows" and "which reads text only",
        "--figure": not hasattr(objective, "labels") and "which has no confusion matrix",
    }
    for name, value in options.items():
        shown = name if value is True else f"{name} {value[0] if isinstance(value, list | tuple) and value else value}"
        if value and name in reasons and reasons[name]:
            raise ConfigError(f"{shown}: this run is {objective.makes}, {reasons[name]}")
        if value and name not in reasons and not is_language_model:
            raise ConfigError(f"{shown}: only for language models; this run is {objective.makes}")


def evaluation_report(
    run: Run,
    data: Sequence[str] | None = None,
    *,
    targets: Sequence[str] = (),
    stride: int | None = None,
    encoding: str = "utf-8",
    quantize: str | None = None,
    details: bool = False,
    overlap: bool = False,
) -> EvaluationReport:
    """Evaluate a run on its held-out data, or on `data`. The overlap of short texts is computed in any case."""
    found, passages = None, None
    try:
        with run.evaluation(data, targets, encoding) as evaluation:
            if details:
                found = evaluation.details(stride)
            metrics = evaluation.metrics(stride) if found is None else dict(found.metrics)
            unchecked = evaluation.compared_bytes or 0
            if overlap or 0 < unchecked <= QUICK_BYTES:
                try:
                    passages, unchecked = evaluation.overlap(), 0
                except RunError:  # damaged training data need not prevent an evaluation on other data
                    if overlap:
                        raise
    except MissingColumnError as error:
        raise DataError(f"{error.line}; this run reads '{error.column}', so rename the column") from None
    baseline = run.results().get(BASELINE) if data is None else None  # known for the run's own data
    metrics |= {} if baseline is None else {BASELINE: baseline}
    why = None
    if baseline is None and "bits_per_byte" in metrics:
        why = (
            f"the run's results have none: {WITHOUT_BASELINE}" if data is None else "known only for the run's own data"
        )
    measured = {"": metrics}
    width = load(run.path, quantize=quantize).quantized if quantize == "auto" else quantize
    if width is not None:
        run.quantize(width)
        measured = {"as trained": metrics, width: run.evaluate(data, stride=stride, encoding=encoding)}
    return EvaluationReport(measured, details=found, overlap=passages, unchecked=unchecked, no_baseline=why)
