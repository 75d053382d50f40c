"""Metrics as they are shown: title, number format, and whether lower is better."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.figures.formats import fixed


@dataclass(frozen=True)
class Metric:
    """Presentation of a metric; `format` is a format specification such as ".1%"."""

    title: str
    format: str = ".3f"
    lower_is_better: bool = False

    def text(self, value: float) -> str:
        """Format a value of the metric."""
        return fixed(value, self.format)


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
METRICS = {name: Metric(**fields) for name, fields in _TABLE.items()}


def against_baseline(metrics: Mapping[str, Any]) -> str:
    """Return a warning if a classifier isn't clearly better than always predicting the most common label, else ""."""
    accuracy, baseline = metrics.get("accuracy"), metrics.get("baseline_accuracy")
    if accuracy is None or baseline is None:
        return ""
    low = metrics.get("intervals", {}).get("accuracy", [accuracy])[0]
    if accuracy > baseline and low >= baseline:
        return ""
    than = "worse than" if accuracy < baseline else "no better than" if accuracy == baseline else "hardly better than"
    return (
        f"With {accuracy:.1%} of its answers right, the model is {than} always predicting the most common label "
        f"({baseline:.1%}): train longer, on more rows, or with a different optimizer.lr."
    )


def metric(name: str) -> Metric:
    """Return a metric by name; one that is not in the table gets its name as title."""
    return METRICS.get(name, Metric(name.replace("_", " ")))
