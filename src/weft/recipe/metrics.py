"""What is measured: each metric in words, how it is printed, and whether lower is better."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric as people read it; `format` is that of a number."""

    title: str
    format: str = ".3f"
    lower_is_better: bool = False


METRICS = {
    "bits_per_byte": Metric("bits per byte", lower_is_better=True),
    "bits_per_character": Metric("bits per character", lower_is_better=True),
    "perplexity": Metric("perplexity", ".2f", lower_is_better=True),
    "loss": Metric("loss", lower_is_better=True),
    "nats_per_character": Metric("loss, nats per character", lower_is_better=True),
    "baseline_bits_per_byte": Metric("bits per byte of character frequencies alone", lower_is_better=True),
    "unknown_share": Metric("unknown tokens", ".2%", lower_is_better=True),
    "next_accuracy": Metric("next-sentence accuracy", ".1%"),
    "accuracy": Metric("accuracy", ".1%"),
    "baseline_accuracy": Metric("accuracy of the commonest label alone", ".1%"),
    "macro_f1": Metric("macro F1"),
    "matthews": Metric("Matthews correlation"),
    "pearson": Metric("Pearson correlation"),
    "spearman": Metric("Spearman correlation"),
    "bleu": Metric("BLEU", ".1f"),
    "chrf": Metric("chrF", ".1f"),
    "rouge_l": Metric("ROUGE-L"),
    "exact": Metric("exact match", ".1%"),
}


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
