"""A model card: what was trained on what, what it cost, what it can do, and the command that repeats it.

Everything in it comes from the run's own records. What they do not say, the card does not say either; above all a
license, which nobody but the owner can give.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]

# the kind of a model and of its head → what the hub calls its task
TASKS = {
    ("encoder", "mlm"): "fill-mask",
    ("encoder", "mlm+nsp"): "fill-mask",
    ("encoder", "sequence"): "text-classification",
    ("decoder", "sequence"): "text-classification",
    ("encoder", "token"): "token-classification",
    ("encoder", "embedding"): "sentence-similarity",
    ("encoder-decoder", "lm"): "translation",
    ("decoder", "lm"): "text-generation",
}
NAMED_PARTS = {"position": "positions", "norm": "norm", "feedforward": "feed-forward", "smoothing": "smoothing"}
# figures of an evaluation as people read them
METRICS = {
    "loss": "loss, nats a token",
    "perplexity": "perplexity a token",
    "bits_per_byte": "bits per byte",
    "nats_per_character": "loss, nats a character",
    "baseline_bits_per_byte": "bits per byte of a simple baseline",
    "accuracy": "accuracy",
    "macro_f1": "F1, mean over classes",
    "bleu": "BLEU",
    "chrf": "chrF",
    "rouge_l": "ROUGE-L",
    "exact": "exact texts, share",
}


# ---- collecting


def run_facts(recipe: Facts, events: Sequence[Facts], results: Facts, license: str | None = None) -> dict[str, Any]:
    """What a card says of a run, from its recipe, the lines of its events.jsonl, and what was counted or measured.

    `results` may give `tokens` (seen in training), `flops`, `data` (a list of {name, sha256, tokens}) and any figures
    of an evaluation; those that the run wrote itself, as it finished, are taken where it does not.
    """
    start, model, finish, imported = (_last(events, name) for name in ("start", "model", "finish", "import"))
    known = {"tokens", "flops", "data", "samples"}
    measured = {**_last(events, "result"), **results}
    settings = recipe.get("model", {})
    return {
        "name": recipe.get("name") or "model",
        "license": license,
        "task": TASKS.get((settings.get("kind"), settings.get("head", {}).get("kind", "lm"))),
        "model": settings,
        "origin": imported.get("origin"),
        "data": list(results.get("data") or _sources(recipe.get("data", {}), start.get("corpus") or ())),
        "tokenizer": recipe.get("tokenizer", {}),
        "objective": recipe.get("objective", {}).get("kind"),
        "parameters": model.get("parameters") or imported.get("parameters"),
        "steps": finish.get("step"),
        "seconds": sum(event.get("seconds", 0.0) for event in events if event.get("event") == "finish") or None,
        "tokens": results.get("tokens"),
        "flops": results.get("flops"),
        "precision": recipe.get("precision") if start else None,
        "seed": recipe.get("seed") if start else None,
        "metrics": {key: value for key, value in measured.items() if key not in known and _figure(value)},
        "samples": [text for text in measured.get("samples") or () if isinstance(text, str)][:3],
        "command": start.get("command"),
        "versions": {name: start[name] for name in ("weft", "torch", "python") if start.get(name)},
        "device": start.get("device"),
    }


def _last(events: Sequence[Facts], name: str) -> Facts:
    return next((event for event in reversed(events) if event.get("event") == name), {})


def _figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sources(data: Facts, corpus: Sequence[str]) -> list[dict[str, Any]]:
    """Each part of the text that was read, with the hash of what was made of it where the run kept one."""
    parts = data.get("mixture") or [data]
    named = [", ".join(part.get("sources") or ()) or part.get("prepared") for part in parts]
    hashes = [*corpus, *[None] * len(named)]
    found = [{"name": name, "sha256": sha} for name, sha in zip(named, hashes, strict=False) if name]
    for part, entry in zip(parts, found, strict=False):
        if part.get("weight") is not None:
            entry["weight"] = part["weight"]
    return found


# ---- writing


def card(facts: Facts) -> str:
    """The card as Markdown, with the front matter that the hub reads."""
    sections = [
        _front(facts),
        f"# {_line(facts.get('name') or 'model')}",
        _what(facts),
        _table("Data", ("source", "weight", "tokens", "sha256"), facts.get("data") or ()),
        _pairs("Counts", _counts(facts)),
        _pairs("Measured on held-out text", _measured(facts.get("metrics") or {})),
        _samples(facts.get("samples") or ()),
        _repeat(facts),
        _license(facts.get("license")),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(facts: Facts) -> str:
    """YAML between two rules; JSON's strings are YAML's too."""
    lines = [f"license: {json.dumps(facts.get('license') or 'unknown')}", 'tags: ["weft"]']
    if facts.get("task"):
        lines.append(f"pipeline_tag: {json.dumps(facts['task'])}")
    return "\n".join(["---", *lines, "---"])


def _what(facts: Facts) -> str:
    model, tokenizer = facts.get("model") or {}, facts.get("tokenizer") or {}
    said = []
    if facts.get("origin"):
        said.append(f"Imported from {_line(facts['origin'])}.")
    if model.get("kind"):
        sizes = [
            f"{key} {_number(model[key])}" for key in ("layers", "d_model", "vocab_size", "context") if key in model
        ]
        parts = [f"{model[key]['kind']} {name}" for key, name in NAMED_PARTS.items() if _kind(model.get(key))]
        said.append(f"A model of kind `{_line(model['kind'])}`: {', '.join([*sizes, *parts])}.")
    if facts.get("objective"):
        said.append(f"Trained for `{_line(facts['objective'])}`.")
    if tokenizer.get("kind"):
        said.append(f"Its text is cut by a `{_line(tokenizer['kind'])}` tokenizer.")
    return " ".join(said)


def _kind(part: object) -> bool:
    return isinstance(part, Mapping) and "kind" in part


def _counts(facts: Facts) -> dict[str, str]:
    counts = {
        "parameters": _number(facts.get("parameters")),
        "steps": _number(facts.get("steps")),
        "tokens seen": _number(facts.get("tokens")),
        "operations in training": f"{facts['flops']:.2e}" if facts.get("flops") else "",
        "time": _duration(facts.get("seconds")),
        "precision": _line(facts.get("precision") or ""),
        "seed": _number(facts.get("seed")),
        "device": _line(facts.get("device") or ""),
    }
    return {name: value for name, value in counts.items() if value}


def _measured(metrics: Facts) -> dict[str, str]:
    known = {METRICS[name]: _number(metrics[name]) for name in METRICS if name in metrics}
    return known | {_line(name): _number(value) for name, value in metrics.items() if name not in METRICS}


def _samples(texts: Sequence[str]) -> str:
    return "\n\n".join(["## What it writes", *map(_fenced, texts)]) if texts else ""


def _repeat(facts: Facts) -> str:
    versions = ", ".join(f"{name} {_line(value)}" for name, value in (facts.get("versions") or {}).items())
    if not facts.get("command"):
        return f"Made with {versions}." if versions else ""
    made = f"\n\nMade with {versions}." if versions else ""
    return f"## How to repeat it\n\n{_fenced(str(facts['command']))}{made}"


def _license(given: str | None) -> str:
    if given:
        return f"## License\n\n{_line(given)}"
    return "## License\n\nUnknown: whoever made this model has not said how it may be used."


# ---- Markdown


def _table(title: str, columns: Sequence[str], rows: Sequence[Facts]) -> str:
    """A table of those columns that some row fills; `source` is a row's name."""
    if not rows:
        return ""
    filled = [{**row, "source": row.get("name")} for row in rows]
    shown = [column for column in columns if any(row.get(column) is not None for row in filled)]
    lines = [shown, ["---"] * len(shown), *[[_cell(row.get(column)) for column in shown] for row in filled]]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _pairs(title: str, values: Mapping[str, str]) -> str:
    if not values:
        return ""
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *(f"| {k} | {_cell(v)} |" for k, v in values.items())])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return _number(value) if _figure(value) else _line(value).replace("|", "\\|")


def _line(value: object) -> str:
    """Anything as one line."""
    return " ".join(str(value).split())


def _fenced(text: str) -> str:
    """A text as it is, between fences that it does not hold."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _number(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{int(value):,}" if _figure(value) else _line(value)  # type: ignore[call-overload]


def _duration(seconds: float | None) -> str:
    if not seconds:
        return ""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
