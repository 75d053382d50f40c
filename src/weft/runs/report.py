"""report.html: what a run did, on one page that needs nothing else."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from weft.costs.count import count
from weft.costs.devices import MFU, device_called
from weft.costs.memory import Workload, training_memory
from weft.costs.units import byte_size, short
from weft.files import write_text
from weft.recipe.config import Recipe
from weft.recipe.metrics import METRICS
from weft.runs.curves import Series, chart, template
from weft.runs.folder import RunFolder, writing
from weft.runs.lines import read_lines
from weft.untrusted import printable

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """What a run's folder says of it."""

    recipe: Recipe
    metrics: Lines
    timings: Lines
    events: Lines

    def last(self, name: str) -> dict[str, Any]:
        """The last event of a kind; empty where there was none."""
        found = self.all(name)
        return found[-1] if found else {}

    def all(self, name: str) -> Lines:
        """Every event of a kind."""
        return [event for event in self.events if event.get("event") == name]

    @cached_property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return sum(line.get("seconds", 0.0) for line in self.timings)

    @cached_property
    def rollbacks(self) -> Lines:
        """The rollbacks, each once: a run that is killed and resumed goes through the same again."""
        return list({(event["step"], event["to"], event["tries"]): event for event in self.all("rollback")}.values())


def write_report(run: RunFolder) -> Path:
    """Write a run's report from what its folder holds, and return where it is."""
    with writing(run.report):
        write_text(run.report, printable(page(run)))  # a model may write any byte; a page may not hold any
    return run.report


def page(run: RunFolder) -> str:
    """The report as HTML."""
    record = Record(run.recipe(), *(read_lines(path) for path in (run.metrics, run.timings, run.events)))
    start, result = record.last("start"), record.last("result")
    return template("report.html").render(
        name=record.recipe.name,
        style=(resources.files("weft") / "web" / "page.css").read_text("utf-8"),
        summary=_summary(record, start),
        cards=_cards(record, result),
        charts=_charts(record, result),
        examples=result.get("table") or [],
        mistakes="predicted" in (result.get("table") or [[]])[0],
        trouble=_trouble(record),
        result=result,
        samples=_earlier_samples(record.all("samples")),
        cost=_cost(record),
        start=start,
        provenance=_provenance(start),
        recipe=run.config.read_text(encoding="utf-8"),
    )


def _summary(record: Record, start: dict[str, Any]) -> str:
    resumed = len(record.all("resume"))
    words = [
        f"started {str(start.get('time', '?'))[:16].replace('T', ' ')}",
        f"on {start.get('device', 'an unknown device')}",
    ]
    if resumed:
        words.append(f"resumed {resumed} time{'s' if resumed > 1 else ''}")
    return ", ".join([*words, _state(record)])


def _state(record: Record) -> str:
    """How far the run is."""
    told = [event for event in record.events if event.get("event") in ("start", "resume", "interrupted", "finish")]
    last, steps = told[-1] if told else {}, record.recipe.steps
    if last.get("event") == "finish":
        seconds = sum(event.get("seconds", 0.0) for event in record.all("finish"))
        return f"finished after {_duration(seconds)}"
    done = max((line["step"] for line in record.metrics), default=0)
    state = f"interrupted after step {last['step']}" if last.get("event") == "interrupted" else f"at step {done}"
    return f"not finished: {state}{f' of {steps}' if steps else ''}"


def _cards(record: Record, result: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers to look at first."""
    cards: list[tuple[str, str]] = []
    for key, metric in METRICS.items():
        if key in ("nats_per_character", "baseline_bits_per_byte") or (key == "unknown_share" and not result.get(key)):
            continue
        if isinstance(result.get(key), float | int):
            cards.append((format(result[key], metric.format), f"{metric.title}, held out"))
    baseline = result.get("baseline_bits_per_byte")
    if cards and baseline is not None:
        cards[0] = (cards[0][0], f"{cards[0][1]} (characters alone: {baseline:.3f})")
    evaluated = [line for line in record.metrics if "validation_loss" in line]
    if evaluated and not cards:
        for key, metric in METRICS.items():
            value = evaluated[-1].get(f"validation_{key}")
            if value is not None:
                cards.append(
                    (format(value, metric.format), f"{metric.title}, held out, at step {evaluated[-1]['step']}")
                )
    logged = [line for line in record.metrics if "loss" in line]
    if logged:
        cards.append((f"{logged[-1]['loss']:.3f}", "last training loss"))
        cards.append((f"{logged[-1]['tokens']:,}", f"tokens read, {logged[-1]['epoch']:.2f} epochs"))
        cards.append((f"{logged[-1]['step']:,}", "steps"))
    if record.last("model").get("parameters"):
        cards.append((f"{record.last('model')['parameters']:,}", "parameters"))
    if record.seconds:
        read = sum(line["tokens_per_second"] * line["seconds"] for line in record.timings)
        cards.append((f"{read / record.seconds:,.0f}", "tokens per second"))
    best = [event for event in record.all("checkpoint") if event.get("best")]
    if best:
        cards.append((f"{best[-1]['step']:,}", "step of the best checkpoint"))
    return cards


def _charts(record: Record, result: dict[str, Any]) -> list[str]:
    metrics = record.metrics
    losses = [
        Series("training", _points(metrics, "loss")),
        Series("held out", _points(metrics, "validation_loss"), dots=True),
    ]
    for event in record.rollbacks[-1:]:
        abandoned = [(step, math.nan if loss is None else loss) for step, loss in event.get("abandoned") or []]
        losses.append(Series("abandoned", abandoned, faint=True))
    marks = [(event["to"], f"rolled back to here from step {event['step']}") for event in record.rollbacks]
    baseline = result.get("baseline_bits_per_byte")
    bits = [Series("held out", _points(metrics, "validation_bits_per_byte"), dots=True)]
    if baseline is not None:
        bits.append(Series("characters", [], level=baseline))
        if result.get("bits_per_byte") and result.get("loss"):  # the same in nats a token, as the loss is
            losses.append(Series("characters", [], level=baseline * result["loss"] / result["bits_per_byte"]))
    speed = Series("tokens per second", _points(record.timings, "tokens_per_second"))
    norm = Series("gradient norm", _points(metrics, "gradient_norm"))
    return [
        chart("Loss", losses, marks=marks),
        chart("Loss, both axes on a log scale", losses, logarithmic=True, marks=marks),
        chart("Bits per byte, held out", bits),
        *(
            chart(
                f"{_capital(METRICS[key].title)}, held out",
                [Series(key, _points(metrics, f"validation_{key}"), dots=True)],
            )
            for key in ("accuracy", "next_accuracy", "spearman")
        ),
        chart("Learning rate", [Series("learning rate", _points(metrics, "lr"))], from_zero=True),
        chart("Gradient norm before clipping", [norm], from_zero=True, marks=marks),
        chart("Tokens per second", [speed], from_zero=True),
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _points(lines: Lines, key: str) -> list[tuple[float, float]]:
    return [(line["step"], math.nan if line[key] is None else line[key]) for line in lines if key in line]


def _trouble(record: Record) -> list[tuple[str, str]]:
    """What the guard did, if anything."""
    rows = [
        (
            f"step {event['since']}",
            f"went wrong; rolled back from step {event['step']} to step {event['to']}, "
            f"continued with {event['rate']:g} of the learning rate",
        )
        for event in record.rollbacks
    ]
    discarded = {step for event in record.all("discarded") for step in event["steps"]}
    if discarded:
        shown = ", ".join(str(step) for step in sorted(discarded)[:12]) + (", …" if len(discarded) > 12 else "")
        rows.append((f"step {shown}", "update discarded: loss or gradient out of bounds"))
    return rows


def _cost(record: Record) -> list[tuple[str, str, str]]:
    """What the settings predicted (as `weft plan` does) beside what was measured, each in one unit."""
    recipe = record.recipe
    length, size = recipe.batch.length, recipe.batch.size
    read = next((line["tokens"] for line in reversed(record.metrics) if "loss" in line), 0)
    if not read or length is None:
        return []
    predicted = count(recipe.model, length, recipe.adapter)
    built, each = record.last("model").get("parameters"), predicted.training(recipe.batch.recompute)
    # how long rows are isn't known from the settings, unless they are batched by tokens
    a_step = recipe.batch.tokens or ((size or 0) * length if recipe.objective.reads != "rows" else 0)
    tokens = (recipe.steps or 0) * a_step
    rows = [
        ("", "predicted", "measured"),
        ("parameters", f"{predicted.parameters:,}", f"{built:,}" if built else ""),
        ("tokens", f"{tokens:,}" if tokens else "", f"{read:,}"),
        ("operations", _flop(tokens * each) if tokens else "", _flop(read * each)),
        *_memory(record),
    ]
    if record.seconds:
        rows.append(("speed", "", f"{_flop(read * each / record.seconds)} per second"))
        rows.append(("time in steps", _expected(record, tokens * each), _duration(record.seconds)))
    evaluating = sum(event.get("seconds", 0.0) for event in record.all("evaluation"))
    if evaluating:
        rows.append(("time in evaluations", "", _duration(evaluating)))
    return rows


def _expected(record: Record, operations: float) -> str:
    """How long so many operations take where the device's speed is known, at `weft plan`'s share of it."""
    start = record.last("start")
    device = device_called(str(start.get("device", "")))
    if device is None or not operations:
        return ""
    processes = start.get("processes")
    speed = MFU * device.peak(record.recipe.precision or "bf16") * (processes if isinstance(processes, int) else 1)
    return f"{_duration(operations / speed)} at {MFU:.0%} of the peak"


def _flop(operations: float) -> str:
    number = short(operations).replace("B", "G")
    return f"{number[:-1]} {number[-1]}FLOP" if number[-1].isalpha() else f"{number} FLOP"


def _memory(record: Record) -> list[tuple[str, str, str]]:
    recipe, tried = record.recipe, record.last("preflight")
    if recipe.batch.size is None or recipe.batch.length is None:
        return []
    # with "auto" the pre-flight found how many rows fit at a time
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else tried.get("micro", recipe.batch.size)
    step = Workload(micro, recipe.batch.length, recipe.precision or "fp32", recipe.optimizer.kind)
    needed = training_memory(recipe.model, step, recipe.adapter).total(recipe.batch.recompute)
    peak = tried.get("memory")
    return [("memory", byte_size(needed), f"{byte_size(peak)}; on a CPU, of the whole process" if peak else "")]


def _earlier_samples(events: Lines) -> list[tuple[str, str]]:
    """What it wrote at each evaluation; of a step that came twice, the later."""
    written = {event["step"]: event["texts"] for event in events}
    return [(f"step {step}", " … ".join(texts)) for step, texts in sorted(written.items())]


def _provenance(start: dict[str, Any]) -> list[tuple[str, str]]:
    noted = {key: start.get(key) for key in ("command", "corpus", "weft", "torch", "python")}
    noted["corpus"] = ", ".join(noted["corpus"] or [])
    return [(key, str(value)) for key, value in noted.items() if value]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return "{} min {} s".format(*divmod(int(seconds), 60))
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"
