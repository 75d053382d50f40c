"""Model card of an exported run: model, data, cost, results, and how to reproduce it.

Everything in it comes from the run's records. The license is that of the imported model, or of the one that training
started from; only its owner can choose another.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from weft.costs.count import count
from weft.costs.units import duration
from weft.recipe.config import Recipe
from weft.recipe.metrics import metric
from weft.runs.report import Record

# (kind of model, kind of head) → task name on the Hugging Face Hub
TASKS = {
    **{("encoder", head): "fill-mask" for head in ("mlm", "mlm+nsp")},
    **{(model, "sequence"): "text-classification" for model in ("encoder", "decoder")},
    ("encoder", "token"): "token-classification",
    ("encoder", "embedding"): "sentence-similarity",
    ("encoder-decoder", "lm"): "translation",
    ("decoder", "lm"): "text-generation",
}
SIZES = ("layers", "d_model", "vocab_size", "context")
NAMED_PARTS = {"position": "positions", "norm": "norm", "feedforward": "feed-forward", "smoothing": "smoothing"}
UNKNOWN = "Unknown: the authors of this model have not stated how it may be used."


def model_card(
    recipe: Recipe, events: Sequence[dict[str, Any]], license: Mapping[str, str] | None = None, *, adapter: int = 0
) -> str:
    """Return the card as Markdown, from a run's recipe and the lines of its events.jsonl.

    `license` holds the license fields of the model's files (`license`, `license_name`, `license_link`). With `adapter`,
    an adapter's number of parameters, the card describes the adapter alone instead of the merged model.
    """
    record = Record(recipe, metrics=(), timings=(), events=events)
    start, result = record.last("start"), record.last("result")
    numbers = {name: value for name, value in result.items() if type(value) in (int, float)}
    metrics = [(metric(name).title, metric(name).text(value)) for name, value in numbers.items()]
    samples = [_fenced(text) for text in result.get("samples") or () if isinstance(text, str)][:3]
    table = result.get("table") or []
    versions = ", ".join(f"{name} {start[name]}" for name in ("weft", "torch", "python") if start.get(name))
    sections = [
        _front_matter(recipe, license or {}),
        f"# {recipe.name}",
        _description(record),
        _data(recipe, start.get("corpus") or ()),
        _table("Counts", ("", ""), [row for row in _counts(record, adapter).items() if row[1]]),
        _table("Results on held-out text", ("", ""), metrics),
        *(["## Samples", *samples] if samples else []),
        _table("Held-out examples", table[0], table[1:4]) if table and "reference" in table[0] else "",
        *(["## How to reproduce it", _fenced(record.commands)] if record.commands else []),
        f"Made with {versions}." if versions else "",
        f"## License\n\n{_license(license) if license else UNKNOWN}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(recipe: Recipe, license: Mapping[str, str]) -> str:
    head = getattr(recipe.model, "head", None)
    task = TASKS.get((recipe.model.kind, head.kind if head is not None else "lm"))
    tag = f'pipeline_tag: "{task}"\n' if task else ""
    fields = {"license": "unknown", **license}  # JSON strings are valid YAML
    lines = "".join(f"{field}: {json.dumps(str(value))}\n" for field, value in fields.items())
    return f'---\n{lines}tags: ["weft"]\n{tag}---'


def _license(license: Mapping[str, str]) -> str:
    names = [f"`{license[field]}`" for field in ("license", "license_name") if field in license]
    link = f" ({license['license_link']})" if "license_link" in license else ""
    return _line(f"{', '.join(names) or 'Another license'}{link}, according to the model's original files.")


def _description(record: Record) -> str:
    recipe, origin = record.recipe, record.last("import").get("origin")
    model = recipe.model.model_dump(mode="json", exclude_none=True)
    parts = [f"{key} {model[key]:,}" for key in SIZES if key in model]
    parts += [f"{model[key]['kind']} {name}" for key, name in NAMED_PARTS.items() if "kind" in model.get(key, ())]
    sentences = [
        *([f"Imported from {_line(origin)}."] if origin else []),
        f"A model of kind `{recipe.model.kind}`: {', '.join(parts)}.",
        f"Trained for `{recipe.objective.kind}`.",
        *([f"Its tokenizer is of kind `{recipe.tokenizer.kind}`."] if recipe.tokenizer is not None else []),
    ]
    return " ".join(sentences)


def _data(recipe: Recipe, corpus: Sequence[str]) -> str:
    """Return a table of the training text, with the hash of its tokens if the run recorded one."""
    weighted = bool(recipe.data.mixture)
    rows = [
        (", ".join(part.sources) or part.prepared, *([f"{part.weight:g}"] if weighted else []), sha or "")
        for part, sha in zip_longest(recipe.data.parts, corpus[: len(recipe.data.parts)])
    ]
    return _table("Data", ("source", "weight", "sha256") if weighted else ("source", "sha256"), rows)


def _counts(record: Record, adapter: int) -> dict[str, str]:
    recipe, start = record.recipe, record.last("start")
    steps, batch = record.last("finish").get("step"), recipe.batch
    seconds = sum(event.get("seconds", 0.0) for event in record.all("finish"))
    counts = {"parameters": f"{count(recipe.model).parameters:,}"}
    if adapter:
        counts = {"parameters of the adapter": f"{adapter:,}", "parameters of its model": counts["parameters"]}
    if steps is not None:
        counts["steps"] = f"{steps:,}"
    if steps is not None and batch.size is not None and batch.length is not None:
        tokens = steps * batch.size * batch.length
        flops = tokens * count(recipe.model, batch.length, recipe.adapter).training()
        counts |= {"tokens seen": f"{tokens:,}", "FLOPs of training": f"{flops:.2e}"}
    if seconds:
        counts["time"] = duration(seconds)
    if start:
        counts |= {"precision": recipe.precision or "", "seed": str(recipe.seed), "device": start.get("device", "")}
    return counts


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[_line(value).replace("|", "\\|") for value in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)]) if cells else ""


def _line(value: object) -> str:
    return " ".join(str(value).split())


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
