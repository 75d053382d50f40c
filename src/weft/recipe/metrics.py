"""What is measured: each metric in words, how it is printed, and whether lower is better."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric as people read it; `format` is that of a number."""

    title: str
    format: str = ".3f"
    lower_is_better: bool = False


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
METRICS = {name: Metric(**told) for name, told in _TABLE.items()}


def against_baseline(found: Mapping[str, Any]) -> str:
    """A sentence about a classifier that is not clearly better than answering with one label always; "" for others."""
    accuracy, baseline = found.get("accuracy"), found.get("baseline_accuracy")
    if accuracy is None or baseline is None:
        return ""
    low = found.get("intervals", {}).get("accuracy", [accuracy])[0]
    if accuracy > baseline and low >= baseline:
        return ""
    than = "worse than" if accuracy < baseline else "no better than" if accuracy == baseline else "hardly better than"
    return (
        f"With {accuracy:.1%} of the answers right, the model is {than} giving the commonest label to everything "
        f"({baseline:.1%}): train it for longer, on more rows, or with another optimizer.lr."
    )


def metric(name: str) -> Metric:
    """A metric by its name; one that is not in the table is printed as it is called."""
    return METRICS.get(name, Metric(name.replace("_", " ")))
