"""A model card: what was trained on what, what it cost, what it can do, and the command that repeats it.

Everything in it comes from the run's own records. What is not in them is not in the card either, least of
all a license, which only the owner can give.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]

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
SIZES = ("layers", "d_model", "vocab_size", "context")
NAMED_PARTS = {"position": "positions", "norm": "norm", "feedforward": "feed-forward", "smoothing": "smoothing"}
# an evaluation's metrics as people read them
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
LICENSE = "## License\n\nUnknown: the people who made this model have not said how it may be used."


def model_card(recipe: Tree, events: Sequence[Tree], tokens: int | None = None, flops: float | None = None) -> str:
    """The card as Markdown, from a run's recipe and the lines of its events.jsonl.

    `tokens` were read and `flops` floating-point operations done in training, where that is known.
    """
    start, result = _last(events, "start"), _last(events, "result")
    samples = [text for text in result.get("samples") or () if isinstance(text, str)][:3]
    sections = [
        _front_matter(recipe.get("model", {})),
        f"# {_line(recipe.get('name') or 'model')}",
        _description(recipe, _last(events, "import")),
        _data(recipe.get("data", {}), start.get("corpus") or ()),
        _pairs("Counts", _counts(recipe, events, tokens, flops)),
        _pairs("Measured on held-out text", _metrics(result)),
        "\n\n".join(["## What it writes", *map(_fenced, samples)]) if samples else "",
        _how_to_repeat(start),
        LICENSE,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _last(events: Sequence[Tree], name: str) -> Tree:
    return next((event for event in reversed(events) if event.get("event") == name), {})


# ---- sections


def _front_matter(model: Tree) -> str:
    """YAML between two rules, as the hub reads it; JSON's strings are YAML's too."""
    task = TASKS.get((model.get("kind", ""), model.get("head", {}).get("kind", "lm")))
    lines = ['license: "unknown"', 'tags: ["weft"]', *([f"pipeline_tag: {json.dumps(task)}"] if task else [])]
    return "\n".join(["---", *lines, "---"])


def _description(recipe: Tree, imported: Tree) -> str:
    model = recipe.get("model", {})
    sentences = []
    if imported.get("origin"):
        sentences.append(f"Imported from {_line(imported['origin'])}.")
    if model.get("kind"):
        sizes = [
            f"{key} {_number(model[key])}" for key in ("layers", "d_model", "vocab_size", "context") if key in model
        ]
        parts = [
            f"{model[key]['kind']} {name}" for key, name in NAMED_PARTS.items() if "kind" in (model.get(key) or ())
        ]
        sentences.append(f"A model of kind `{_line(model['kind'])}`: {', '.join([*sizes, *parts])}.")
    if kind := recipe.get("objective", {}).get("kind"):
        sentences.append(f"Trained for `{_line(kind)}`.")
    if kind := recipe.get("tokenizer", {}).get("kind"):
        sentences.append(f"Its tokenizer is of kind `{_line(kind)}`.")
    return " ".join(sentences)


def _data(data: Tree, corpus: Sequence[str]) -> str:
    """A table of the text that was read, with the hash of the tokens made of it where the run kept one."""
    parts = data.get("mixture") or [data]
    hashes = [*corpus, *[None] * len(parts)]
    rows = [
        {
            "source": ", ".join(part.get("sources") or ()) or part.get("prepared"),
            "weight": part.get("weight"),
            "sha256": sha,
        }
        for part, sha in zip(parts, hashes, strict=False)
    ]
    rows = [row for row in rows if row["source"]]
    columns = [key for key in ("source", "weight", "sha256") if any(row[key] is not None for row in rows)]
    return _table("Data", columns, ([row[key] for key in columns] for row in rows)) if rows else ""


def _counts(recipe: Tree, events: Sequence[Tree], tokens: int | None, flops: float | None) -> dict[str, str]:
    start = _last(events, "start")
    parameters = _last(events, "model").get("parameters") or _last(events, "import").get("parameters")
    seconds = sum(event.get("seconds", 0.0) for event in events if event.get("event") == "finish")
    return {
        "parameters": _number(parameters),
        "steps": _number(_last(events, "finish").get("step")),
        "tokens seen": _number(tokens),
        "operations in training": f"{flops:.2e}" if flops else "",
        "time": _duration(seconds),
        "precision": _line(recipe.get("precision") or "") if start else "",
        "seed": _number(recipe.get("seed")) if start else "",
        "device": _line(start.get("device") or ""),
    }


def _metrics(result: Tree) -> dict[str, str]:
    measured = {name: _number(value) for name, value in result.items() if _is_number(value)}
    known = {title: measured.pop(name) for name, title in METRICS.items() if name in measured}
    return known | {_line(name): value for name, value in measured.items()}


def _how_to_repeat(start: Tree) -> str:
    versions = ", ".join(f"{name} {_line(start[name])}" for name in ("weft", "torch", "python") if start.get(name))
    made = f"Made with {versions}." if versions else ""
    if not start.get("command"):
        return made
    return "\n\n".join(filter(None, ["## How to repeat it", _fenced(str(start["command"])), made]))


# ---- Markdown


def _pairs(title: str, values: Mapping[str, str]) -> str:
    filled = [(key, value) for key, value in values.items() if value]
    return _table(title, ("", ""), filled) if filled else ""


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _cell(value: object) -> str:
    return _number(value).replace("|", "\\|")


def _line(value: object) -> str:
    """Anything as one line."""
    return " ".join(str(value).split())


def _fenced(text: str) -> str:
    """A text as it is, between fences that it does not contain."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> str:
    """A number for people; anything else as one line, None as nothing."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{int(value):,}" if _is_number(value) else _line(value)  # type: ignore[call-overload]


def _duration(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds" if seconds else ""
