"""report.html: a run's curves, samples and costs on one self-contained page."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.costs.count import count
from weft.costs.devices import MFU, device_called
from weft.costs.memory import Workload, training_memory
from weft.costs.units import byte_size, duration, short
from weft.errors import counted
from weft.figures.formats import fixed, general
from weft.figures.page import Section, html_table, page, part
from weft.figures.plot import PLAIN, Axis, Look, Plot, Series
from weft.figures.shapes import html_plots
from weft.figures.tables import Table
from weft.recipe.config import Recipe
from weft.recipe.metrics import METRICS, against_baseline
from weft.runs.folder import STATES, RunFolder, writing
from weft.runs.lines import read_lines
from weft.runs.logbook import epoch_table, event_table, source_table
from weft.storage import files
from weft.storage.files import write_text

Lines = Sequence[dict[str, Any]]
WHOLE_PROCESS = "On a CPU, the measured memory is that of the whole process."
EMPTY_LINES = re.compile(r"\n\s*\n\s*\n")  # runs of empty lines, which are shortened in early samples
# of a model with experts, in the order of `RoutingSums.metrics`
ROUTING = ("busiest_expert", "idle_experts", "router_entropy", "dropped_tokens")
DOTTED = Look(marker="o")  # for values that are measured only at evaluations


@dataclass(frozen=True)
class Record:
    """Recipe, metrics, timings and events of a run."""

    recipe: Recipe
    metrics: Lines
    timings: Lines
    events: Lines

    def last(self, name: str) -> dict[str, Any]:
        """Return the last event with this name; empty if there is none."""
        return (self.all(name) or [{}])[-1]

    def all(self, name: str) -> Lines:
        """Return all events with this name."""
        return [event for event in self.events if event.get("event") == name]

    @property
    def commands(self) -> str:
        """Commands that reproduce the run: its start, and later changes of its recipe; empty if unknown."""
        if not (start := self.last("start").get("command")):
            return ""
        changes = [event for event in self.all("recipe") if event.get("command")]
        return "\n".join([start, *(f"{event['command']}  # after step {event['step']}" for event in changes)])

    @cached_property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return sum(line.get("seconds", 0.0) for line in self.timings)

    @cached_property
    def rollbacks(self) -> Lines:
        """Rollbacks without repetitions: a run that is killed and resumed may record the same one again."""
        return list({(event["step"], event["to"], event["tries"]): event for event in self.all("rollback")}.values())

    @property
    def sources(self) -> Table:
        """Epochs of each source of a mixture; no rows if there is only one."""
        return source_table(self.last("start").get("sources") or [], self.metrics)

    def tables(self) -> list[Table]:
        """Return what was logged by epoch, by source and by event."""
        discarded = sorted({step for event in self.all("discarded") for step in event["steps"]})
        events = event_table(self.rollbacks, discarded, self.all("resume"))
        return [table for table in (epoch_table(self.metrics), self.sources, events) if table.rows or table is events]

    @property
    def rate_cut(self) -> str:
        """A sentence about the learning rate that rollbacks have cut; "" if there were none."""
        if not self.rollbacks:
            return ""
        rate, planned = self.rollbacks[-1]["rate"], self.recipe.optimizer and self.recipe.optimizer.lr
        rates = f", from {planned:g} to {general(rate * planned, 3)}" if planned else ""
        return (
            f"Training diverged and was rolled back {counted(len(self.rollbacks), 'time')}: the learning rate was cut "
            f"to {general(rate, 3)} of optimizer.lr{rates}. Begin the next run with a lower optimizer.lr."
        )


def write_report(run: RunFolder) -> Path:
    """Write a run's report, and return its path."""
    with writing(run.report):
        write_text(run.report, report(run))
    return run.report


def read_record(run: RunFolder) -> Record:
    """Read the record of a run."""
    metrics, timings, events = (read_lines(path) for path in (run.metrics, run.timings, run.events))
    return Record(run.recipe(), metrics=metrics, timings=timings, events=events)


def report(run: RunFolder) -> str:
    """Return the report as HTML."""
    record = read_record(run)
    start, result = record.last("start"), record.last("result")
    header, *examples = result.get("table") or [[]]
    samples = {event["step"]: EMPTY_LINES.sub("\n\n", " … ".join(event["texts"])) for event in record.all("samples")}
    origin = {"command": record.commands, "corpus": ", ".join(start.get("corpus") or [])}
    origin |= {key: str(start.get(key) or "") for key in ("weft", "torch", "python")}
    parts = {
        "": part("cards", _cards(record, result)),
        "Curves": html_plots(plots(record, result)),
        "Cross-entropy by epoch": _filled(epoch_table(record.metrics)._replace(title="")),
        "Epochs by source": _filled(record.sources._replace(title="")),
        "Discarded updates and rollbacks": _pairs(_divergence(record)),
        "Confusion matrix": _confusion(result),
        "Most confident mistakes" if "predicted" in header else "Held-out examples": _cards_table(header, examples),
        "Samples": part("texts", result.get("samples") or ()),
        "Samples during training": _pairs([(f"step {step}", text) for step, text in sorted(samples.items())]),
        "Cost": _filled(Table(("", "predicted", "measured"), _cost(record), remarks=[WHOLE_PROCESS])),
        "Settings chosen by weft": _cards_table(("setting", "chosen", "why"), start.get("choices") or ()),
        "How to reproduce it": _pairs([row for row in origin.items() if row[1]]),
        "Recipe": part("fold", run.config.name, part("texts", [files.read_text(run.config)])),
    }
    lead = {"": " ".join(filter(None, (against_baseline(result), record.rate_cut)))}
    sections = [Section(title, lead.get(title, ""), html, ("chart.js",)) for title, html in parts.items() if html]
    began, resumed = str(start.get("time", "?"))[:16].replace("T", " "), len(record.all("resume"))
    name, recipe = run.path.resolve().name, record.recipe.name
    summary = [f"recipe {recipe}" if recipe != name else "", f"started {began}"]
    summary.append(f"on {start.get('device', 'an unknown device')}")
    summary += [f"resumed {counted(resumed, 'time')}" if resumed else "", _state(record)]
    return page(name, sections, summary=", ".join(filter(None, summary)), styles=("page.css",))


def _filled(table: Table, **options: Any) -> str:
    """Render a table, with every value as text; "" if it has no rows."""
    rows = [list(map(str, row)) for row in table.rows]
    return html_table(table._replace(rows=rows), **options) if rows else ""


def _cards_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return _filled(Table(header, rows, text=range(len(header))), kind="prose", row_names=True, cards=True)


def _pairs(rows: Sequence[Sequence[str]]) -> str:
    return _filled(Table(("", ""), rows, text=(0, 1, 2)), kind="prose pairs")


def _confusion(result: dict[str, Any]) -> str:
    """Render counts by actual (rows) and predicted label, each shaded by its share of the row."""
    labels, matrix = result.get("labels") or (), result.get("matrix") or ()
    rows = [(label, *(f"{count:,}" for count in counts)) for label, counts in zip(labels, matrix, strict=False)]
    shades = [[round(70 * count / max(1, sum(counts))) for count in counts] for counts in matrix]
    return _filled(Table(("actual ↓ predicted →", *labels), rows), kind="shades", shades=shades)


def _state(record: Record) -> str:
    states = [event for event in record.events if event.get("event") in STATES]
    last, steps = states[-1] if states else {}, record.recipe.steps
    if last.get("event") == "finish":
        return f"finished after {duration(sum(event.get('seconds', 0.0) for event in record.all('finish')))}"
    done = max((line["step"] for line in record.metrics), default=0)
    state = f"interrupted after step {last['step']}" if last.get("event") == "interrupted" else f"at step {done}"
    return f"not finished: {state}{f' of {steps}' if steps else ''}"


def _metric_cards(values: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    hidden, intervals = ("nats_per_character", "baseline_bits_per_byte"), values.get("intervals") or {}
    spans = {key: "–".join(METRICS[key].text(end) for end in intervals[key]) for key in intervals}
    return [
        (metric.text(values[key]), f"{metric.title}, {where}" + (f" ({spans[key]})" if key in spans else ""))
        for key, metric in METRICS.items()
        if isinstance(values.get(key), float | int) and key not in hidden and (values[key] or key != "unknown_share")
    ]


def _cards(record: Record, result: dict[str, Any]) -> list[tuple[str, str]]:
    cards = _metric_cards(result, "held out")
    if cards and (baseline := result.get("baseline_bits_per_byte")) is not None:
        cards[0] = (cards[0][0], f"{cards[0][1]} (character frequencies alone: {baseline:.3f})")
    evaluated = [line for line in record.metrics if "validation_loss" in line]
    if evaluated and not cards:
        last = {key.removeprefix("validation_"): evaluated[-1][key] for key in evaluated[-1] if "validation_" in key}
        cards = _metric_cards(last, f"held out, at step {evaluated[-1]['step']}")
    logged = [line for line in record.metrics if "loss" in line]
    if logged:
        last = logged[-1]
        tokens = (f"{last['tokens']:,}", f"tokens read, {last['epoch']:.2f} epochs")
        cards += [(fixed(last["loss"]), "last training loss"), tokens, (f"{last['step']:,}", "steps")]
    if record.last("model").get("parameters"):
        cards.append((f"{record.last('model')['parameters']:,}", "parameters"))
    if record.seconds:
        tokens_timed = sum(line["tokens_per_second"] * line["seconds"] for line in record.timings)
        cards.append((f"{tokens_timed / record.seconds:,.0f}", "tokens per second"))
    if best := [event for event in record.all("checkpoint") if event.get("best")]:
        cards.append((f"{best[-1]['step']:,}", "step of the best checkpoint"))
    return cards


def plots(record: Record, result: dict[str, Any]) -> list[Plot]:
    """Return the curves of a run; `result` is its final evaluation."""
    metrics = record.metrics
    losses = [_curve("training", metrics, "loss"), _curve("held out", metrics, "validation_loss", look=Look("c1", "o"))]
    for event in record.rollbacks[-1:]:
        abandoned = [(step, math.nan if loss is None else loss) for step, loss in event.get("abandoned") or []]
        losses.append(Series("abandoned", abandoned, Look("c2", width=0.9)))
    bits = [_curve("held out", metrics, "validation_bits_per_byte", look=DOTTED)]
    if (baseline := result.get("baseline_bits_per_byte")) is not None:
        bits.append(_level(baseline))
        if result.get("bits_per_byte") and result.get("loss"):  # in nats per token, like the loss
            losses.append(_level(baseline * result["loss"] / result["bits_per_byte"]))
    marks = [(event["to"], f"rolled back to here from step {event['step']}") for event in record.rollbacks]
    step, log_step, from_zero = Axis("step", pad=0), Axis("step", log=True, pad=0), Axis(includes=(0.0,), clips=True)
    keys = ("accuracy", "next_accuracy", "spearman")
    others = {METRICS[key].title: _curve(key, metrics, f"validation_{key}", look=DOTTED) for key in keys}
    charts = [
        Plot("Loss", losses, step, Axis(clips=True), marks),
        Plot("Loss, both axes on a log scale", losses, log_step, Axis(log=True, clips=True), marks),
        Plot("Bits per byte, held out", bits, step, Axis(clips=True)),
        *(Plot(f"{title[0].upper()}{title[1:]}, held out", [curve], step) for title, curve in others.items()),
        *(Plot(METRICS[key].title.capitalize(), [_curve(key, metrics, key)], step, from_zero) for key in ROUTING),
        Plot("Learning rate", [_curve("learning rate", metrics, "lr")], step, Axis(includes=(0.0,))),
        Plot("Gradient norm before clipping", [_curve("norm", metrics, "gradient_norm")], step, from_zero, marks),
        Plot("Loss scale of fp16", [_curve("loss scale", metrics, "loss_scale")], step, Axis(log=True), marks),
        Plot("Tokens per second", [_curve("speed", record.timings, "tokens_per_second")], step, from_zero),
    ]
    return [plot for plot in charts if any(len(series.points) > 1 for series in plot.series)]


def _curve(name: str, lines: Lines, key: str, *, look: Look = PLAIN) -> Series:
    """Return a value over steps; a single point appears only as a value after the name."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    single = f"{name} {points[0][1]:.4g}" if points else ""
    return Series(name, points, look) if len(points) > 1 else Series(single, look=look)


def _level(value: float) -> Series:
    return Series(f"character frequencies {value:.4g}", look=Look("c3", dash="6 4", width=1.3), level=value)


def _divergence(record: Record) -> list[tuple[str, str]]:
    rows = []
    for event in record.rollbacks:
        back = f"diverged; rolled back from step {event['step']} to step {event['to']}"
        rate = f"{general(event['rate'], 3)} of the learning rate"
        rows.append((f"step {event['since']}", f"{back}, continued with {rate}"))
    if discarded := {step for event in record.all("discarded") for step in event["steps"]}:
        shown = ", ".join(str(step) for step in sorted(discarded)[:12]) + (", …" if len(discarded) > 12 else "")
        rows.append((f"step {shown}", "update discarded: loss or gradient out of bounds"))
    return rows


def _cost(record: Record) -> list[tuple[str, str, str]]:
    """Return rows of costs: what the settings predict, as in `weft plan`, and what was measured."""
    recipe = record.recipe
    length, size = recipe.batch.length, recipe.batch.size
    read = next((line["tokens"] for line in reversed(record.metrics) if "loss" in line), 0)
    if not read or length is None:
        return []
    predicted = count(recipe.model, length, recipe.adapter)
    built, flops = record.last("model").get("parameters"), predicted.training(recipe.batch.recompute)
    # the settings don't say how long rows are, unless batches are measured in tokens
    per_step = recipe.batch.tokens or ((size or 0) * length if recipe.objective.reads != "rows" else 0)
    tokens = (recipe.steps or 0) * per_step
    rows = [
        ("parameters", f"{predicted.parameters:,}", f"{built:,}" if built else ""),
        ("tokens", f"{tokens:,}" if tokens else "", f"{read:,}"),
        ("compute", _flop(tokens * flops) if tokens else "", _flop(read * flops)),
        *_memory(record),
    ]
    if record.seconds:
        rows.append(("speed", "", f"{_flop(read * flops / record.seconds)}/s"))
        rows.append(("time in steps", _expected(record, tokens * flops), duration(record.seconds)))
    if evaluating := sum(event.get("seconds", 0.0) for event in record.all("evaluation")):
        rows.append(("time in evaluations", "", duration(evaluating)))
    return rows


def _expected(record: Record, flops: float) -> str:
    """Return the predicted time of this many FLOPs at `weft plan`'s utilisation; "" if the device is unknown."""
    start = record.last("start")
    device = device_called(str(start.get("device", "")))
    if device is None or not flops:
        return ""
    processes = start.get("processes")
    speed = MFU * device.peak(record.recipe.precision or "bf16") * (processes if isinstance(processes, int) else 1)
    return f"{duration(flops / speed)} at {MFU:.0%} of the peak"


def _flop(count: float) -> str:
    number = short(count).replace("B", "G")
    return f"{number[:-1]} {number[-1]}FLOP" if number[-1].isalpha() else f"{number} FLOP"


def _memory(record: Record) -> list[tuple[str, str, str]]:
    recipe, preflight = record.recipe, record.last("preflight")
    if recipe.batch.size is None or recipe.batch.length is None or recipe.optimizer is None:
        return []
    # with "auto" the pre-flight found how many rows fit
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else preflight.get("micro", recipe.batch.size)
    step = Workload(micro, recipe.batch.length, recipe.precision or "fp32", recipe.optimizer.kind)
    needed = training_memory(recipe.model, step, recipe.adapter).total(recipe.batch.recompute)
    peak = preflight.get("memory")
    return [("memory", byte_size(needed), byte_size(peak) if peak else "")]
