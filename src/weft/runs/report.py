"""report.html: what a run did, on one page that needs nothing else."""

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import RunError
from weft.explain.count import count
from weft.explain.memory import training_memory
from weft.explain.quantity import memory
from weft.files import write_text
from weft.recipe.config import Recipe
from weft.runs.curves import Mark, Series, chart
from weft.runs.folder import RunFolder, open_run, read_lines

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf7; --ink: #22211f; --soft: #6d6a64; --rule: #dedad2; --card: #ffffff;
  --c0: #2f6f9f; --c1: #c4562a; --c2: #4f8a4b; }
@media (prefers-color-scheme: dark) { :root { --page: #171614; --ink: #e9e6df; --soft: #9d998f; --rule: #37352f;
  --card: #1f1e1b; --c0: #79b4e0; --c1: #ec8f66; --c2: #8fc98a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 2rem 1.2rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .7rem; }
.soft { color: var(--soft); } code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .8rem 1rem;
  margin: 0 0 .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: .7rem;
  margin-top: 1.2rem; }
.figures div { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .8rem; }
.figures b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .8rem; }
.chart { width: 100%; height: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; }
.chart text { fill: var(--ink); font-size: 13px; } .chart .title { font-weight: 600; }
.chart .tick { fill: var(--soft); font-size: 12px; } .chart .end { text-anchor: end; }
.chart .middle { text-anchor: middle; }
.chart .grid { stroke: var(--rule); } .chart .axis { stroke: var(--soft); }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart .mark { stroke: var(--c1); stroke-dasharray: 3 3; stroke-width: 1.4; } .chart .faint { opacity: .45; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td:first-child, td:nth-child(2) { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.counts td, .counts td:first-child, .counts td:nth-child(2) { text-align: right; padding: .3rem .8rem; font: inherit; }
"""


OTHER_FIGURES = {
    "accuracy": (".1%", "accuracy"),
    "macro_f1": (".3f", "macro F1"),
    "matthews": (".3f", "Matthews correlation"),
    "spearman": (".3f", "Spearman correlation"),
    "exact": (".1%", "exactly right"),
    "bleu": (".1f", "BLEU"),
    "chrf": (".1f", "chrF"),
    "next_accuracy": (".1%", "right about the next sentence"),
}


def write_report(run: RunFolder | Path | str) -> Path:
    """Write a run's report from what its folder holds, and say where it is."""
    folder = run if isinstance(run, RunFolder) else open_run(run)
    try:
        write_text(folder.report, page(folder))
    except OSError as error:
        raise RunError(f"{folder.report}: cannot be written: {error.strerror or error}") from None
    return folder.report


def page(run: RunFolder) -> str:
    """The report as HTML."""
    recipe = run.recipe()
    metrics, timings, events = (list(read_lines(path)) for path in (run.metrics, run.timings, run.events))
    start, model, result = (_last(events, name) for name in ("start", "model", "result"))
    rollbacks = _rollbacks(events)
    title = escape(recipe.name)
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(_summary(events, start))}</p>',
        _figures(metrics, timings, events, model, result),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(_charts(metrics, timings, rollbacks))}</div>',
        _trouble(rollbacks, events),
        _confusion(result),
        _samples(result.get("samples") or []),
        _on_the_way(events),
        _cost(recipe, metrics, timings, events, model),
        _choices(start.get("choices") or []),
        _provenance(start),
        f"<h2>Recipe</h2><pre>{escape(run.config.read_text(encoding='utf-8'))}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} · weft</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _last(events: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [event for event in events if event.get("event") == name]
    return found[-1] if found else {}


def _summary(events: Sequence[dict[str, Any]], start: dict[str, Any]) -> str:
    finish = _last(events, "finish")
    resumed = sum(event.get("event") == "resume" for event in events)
    seconds = sum(event.get("seconds", 0.0) for event in events if event.get("event") == "finish")
    words = [f"started {start.get('time', '?')}", f"on {start.get('device', 'an unknown device')}"]
    if resumed:
        words.append(f"resumed {resumed} time{'s' if resumed > 1 else ''}")
    words.append(f"finished after {_duration(seconds)}" if finish else "not finished")
    return ", ".join(words)


def _figures(
    metrics: Sequence[dict[str, Any]],
    timings: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    model: dict[str, Any],
    result: dict[str, Any],
) -> str:
    """The numbers to look at first."""
    logged = [line for line in metrics if "loss" in line]
    cards: list[tuple[str, str]] = []
    if result.get("bits_per_byte") is not None:
        baseline = result.get("baseline_bits_per_byte")
        beside = f" (characters alone: {baseline:.3f})" if baseline is not None else ""
        cards.append((f"{result['bits_per_byte']:.3f}", f"bits per byte, held out{beside}"))
    if result.get("perplexity") is not None:
        cards.append((f"{result['perplexity']:.2f}", "perplexity a token, held out"))
    for key, (form, what) in OTHER_FIGURES.items():
        if result.get(key) is not None:
            cards.append((format(result[key], form), f"{what}, held out"))
    if result.get("loss") is not None:
        cards.append((f"{result['loss']:.3f}", "loss, held out"))
    if logged:
        cards.append((f"{logged[-1]['loss']:.3f}", "last training loss"))
        cards.append((f"{logged[-1]['tokens']:,}", f"tokens read, {logged[-1]['epoch']:.2f} epochs"))
        cards.append((f"{logged[-1]['step']:,}", "steps"))
    if model.get("parameters"):
        cards.append((f"{model['parameters']:,}", "parameters"))
    seconds = sum(line.get("seconds", 0.0) for line in timings)
    if seconds:
        read = sum(line["tokens_per_second"] * line["seconds"] for line in timings)
        cards.append((f"{read / seconds:,.0f}", "tokens a second"))
    best = [event for event in events if event.get("event") == "checkpoint" and event.get("best")]
    if best:
        cards.append((f"{best[-1]['step']:,}", "step of the best checkpoint"))
    return '<div class="figures">' + "".join(f"<div><b>{v}</b>{escape(k)}</div>" for v, k in cards) + "</div>"


def _rollbacks(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The returns to a checkpoint, each once: a run that is killed and resumed goes through the same again."""
    found = (event for event in events if event.get("event") == "rollback")
    return list({(event["step"], event["to"], event["tries"]): event for event in found}.values())


def _charts(
    metrics: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]], rollbacks: Sequence[dict[str, Any]]
) -> list[str]:
    losses = [
        Series("training", _points(metrics, "loss")),
        Series("held out", _points(metrics, "validation_loss"), dots=True),
    ]
    for event in rollbacks[-1:]:
        given_up = [(step, math.nan if loss is None else loss) for step, loss in event.get("abandoned") or []]
        losses.append(Series("given up", given_up, faint=True))
    marks = [Mark(event["to"], f"back to here from step {event['step']}") for event in rollbacks]
    return [
        chart("Loss", losses, marks=marks),
        chart("Loss, both axes on a log scale", losses, log_x=True, log_y=True, marks=marks),
        chart("Bits per byte, held out", [Series("held out", _points(metrics, "validation_bits_per_byte"), dots=True)]),
        chart("Learning rate", [Series("learning rate", _points(metrics, "lr"))], from_zero=True),
        chart(
            "Gradient norm before clipping",
            [Series("gradient norm", _points(metrics, "gradient_norm"))],
            from_zero=True,
            marks=marks,
        ),
        chart("Tokens a second", [Series("tokens a second", _points(timings, "tokens_per_second"))], from_zero=True),
    ]


def _points(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(line["step"], math.nan if line[key] is None else line[key]) for line in lines if key in line]


def _trouble(rollbacks: Sequence[dict[str, Any]], events: Iterable[dict[str, Any]]) -> str:
    """What the guard did, if anything."""
    rows = [
        f"<tr><td>step {event['since']}</td><td>went wrong; at step {event['step']} back to step {event['to']}, "
        f"on with {event['rate']:g} of the learning rate</td></tr>"
        for event in rollbacks
    ]
    held = {step for event in events if event.get("event") == "discarded" for step in event["steps"]}
    if held:
        shown = ", ".join(str(step) for step in sorted(held)[:12]) + (", …" if len(held) > 12 else "")
        rows.append(f"<tr><td>step {shown}</td><td>update not made: loss or gradient out of bounds</td></tr>")
    table = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    return f"<h2>When training went wrong</h2>{table}" if rows else ""


def _cost(
    recipe: Recipe,
    metrics: Sequence[dict[str, Any]],
    timings: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    model: dict[str, Any],
) -> str:
    """What the settings predicted (as `weft plan` does), and what came."""
    length, size = recipe.batch.length, recipe.batch.size
    read = next((line["tokens"] for line in reversed(metrics) if "loss" in line), 0)
    if not read or length is None or size is None:
        return ""
    predicted = count(recipe.model, length, recipe.adapter)
    seconds = sum(line.get("seconds", 0.0) for line in timings)
    work = predicted.training() * read
    rows = [("parameters", f"{predicted.parameters:,}", f"{model['parameters']:,}" if model.get("parameters") else "")]
    speed = f"{work / seconds:.2e} a second for {_duration(seconds)}" if seconds else ""
    rows.append(("operations", f"{work:.2e}", speed))
    tried = _last(events, "preflight")
    # with "auto" the pre-flight found how many rows fit at a time
    micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else tried.get("micro", size)
    needed = training_memory(
        recipe.model, micro, length, recipe.precision or "fp32", recipe.optimizer.kind, adapter=recipe.adapter
    )
    peak = tried.get("memory")
    held = f"{memory(peak)}, on a processor with all that belongs to the process" if peak else ""
    rows.append(("memory", memory(needed.total(recipe.batch.recompute)), held))
    body = "".join(f"<tr><td>{k}</td><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for k, a, b in rows)
    head = "<tr><td></td><td>predicted</td><td>measured</td></tr>"
    return f'<h2>Cost</h2><div class="scroll"><table>{head}{body}</table></div>'


def _confusion(result: dict[str, Any]) -> str:
    """What was told for which true label: the shade is the share of the row."""
    if "matrix" not in result:
        return ""
    labels, rows = result["labels"], []
    for label, counts in zip(labels, result["matrix"], strict=True):
        total = max(1, sum(counts))
        cells = "".join(
            f'<td style="background: color-mix(in srgb, var(--c0) {round(70 * count / total)}%, transparent)">'
            f"{count:,}</td>"
            for count in counts
        )
        rows.append(f"<tr><td>{escape(str(label))}</td>{cells}</tr>")
    head = "".join(f"<td>{escape(str(label))}</td>" for label in labels)
    table = f'<table class="counts"><tr><td>true ↓ told →</td>{head}</tr>{"".join(rows)}</table>'
    return f'<h2>Which labels are taken for which</h2><div class="scroll">{table}</div>'


def _samples(samples: Sequence[str]) -> str:
    if not samples:
        return ""
    return "<h2>What it writes</h2>" + "".join(f"<pre>{escape(sample)}</pre>" for sample in samples)


def _on_the_way(events: Iterable[dict[str, Any]]) -> str:
    """What it wrote at each evaluation; of a step that came twice, the later."""
    written = {event["step"]: event["texts"] for event in events if event.get("event") == "samples"}
    rows = "".join(
        f"<tr><td>step {step}</td><td>{escape(' … '.join(texts))}</td></tr>" for step, texts in sorted(written.items())
    )
    return f'<h2>What it wrote on the way</h2><div class="scroll"><table>{rows}</table></div>' if rows else ""


def _choices(choices: Sequence[Sequence[str]]) -> str:
    if not choices:
        return ""
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(value)}</td><td>{escape(why)}</td></tr>" for key, value, why in choices
    )
    return f'<h2>What was chosen, and why</h2><div class="scroll"><table>{rows}</table></div>'


def _provenance(start: dict[str, Any]) -> str:
    lines = {
        "command": start.get("command"),
        "corpus": ", ".join(start.get("corpus") or []) or None,
        "weft": start.get("weft"),
        "torch": start.get("torch"),
        "python": start.get("python"),
    }
    rows = "".join(f"<tr><td>{k}</td><td>{escape(str(v))}</td></tr>" for k, v in lines.items() if v)
    return f'<h2>How to repeat it</h2><div class="scroll"><table>{rows}</table></div>' if rows else ""


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 86400:.1f} days"
