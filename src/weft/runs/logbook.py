"""Logbook of a run: losses by epoch, epochs of each source, and what happened to it."""

import math
from collections.abc import Sequence
from typing import Any

from weft.costs.units import short
from weft.figures.formats import fixed, general
from weft.figures.tables import Table

MAX_EPOCH_ROWS = 24  # of a table; a longer run shows evenly spaced epochs
Lines = Sequence[dict[str, Any]]


def epoch_table(metrics: Lines) -> Table:
    """Return the mean training loss of each epoch, and the held-out loss at its end; no rows if nothing was logged."""
    rows: list[tuple[str, ...]] = []
    logged = [line for line in metrics if line.get("loss") is not None and line.get("epoch") is not None]
    last = logged[-1]["epoch"] if logged else 0.0
    epochs = range(1, math.ceil(last) + 1)
    stride = -(-len(epochs) // MAX_EPOCH_ROWS) if epochs else 1
    for epoch in epochs:
        lines = [line for line in logged if epoch - 1 < line["epoch"] <= epoch]
        if not lines or (epoch % stride and epoch != epochs[-1]):
            continue
        end = lines[-1]["step"]
        held_out = [line["validation_loss"] for line in metrics if line["step"] <= end and line.get("validation_loss")]
        training = sum(line["loss"] for line in lines) / len(lines)
        gap = f"{held_out[-1] - training:+.3f}".replace("-", "−") if held_out else ""
        name = f"{last:.2f}" if epoch > last else str(epoch)
        rows.append((name, f"{end:,}", fixed(training), fixed(held_out[-1]) if held_out else "", gap))
    header = ("epoch", "step", "training", "held out", "gap")
    remark = "Mean training loss of the epoch, and held-out loss at the last evaluation in it or before, in nats."
    return Table(header, rows, "Cross-entropy by epoch", [remark] if rows else [], text=())


def source_table(sources: Lines, metrics: Lines) -> Table:
    """Return the epochs of each source of a mixture: weight × tokens read ÷ tokens of the source."""
    read = next((line["tokens"] for line in reversed(metrics) if "tokens" in line), 0)
    total = sum(source["weight"] for source in sources)
    rows = []
    for source in (source for source in sources if source["tokens"]):
        share = source["weight"] / total
        epochs = f"{share * read / source['tokens']:.2f}"
        rows.append((str(source["name"]), short(source["tokens"]), f"{share:.0%}", short(round(share * read)), epochs))
    header = ("source", "tokens", "weight", "read", "epochs")
    return Table(header, rows if len(rows) > 1 else [], "Epochs by source" if len(rows) > 1 else "")


def event_table(rollbacks: Lines, discarded: Sequence[int], resumes: Lines) -> Table:
    """Return what happened to the run, step by step, and how often."""
    rows = [(e["step"], "rollback", f"to step {e['to']}; learning rate × {general(e['rate'], 3)}") for e in rollbacks]
    rows += [(step, "update discarded", "loss or gradient norm out of bounds") for step in discarded]
    rows += [(event["step"], "resumed", "") for event in resumes if "step" in event]
    shown = [(f"{step:,}", name, about) for step, name, about in sorted(rows)]
    summary = f"rollbacks {len(rollbacks)}, discarded updates {len(discarded)}, resumed {len(resumes)} times"
    return Table(("step", "event", "") if shown else ("", "", ""), shown, "Logbook", [summary], text=(1, 2))
