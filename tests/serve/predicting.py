"""Small runs of every kind that predicts something other than tokens: two steps on a few rows."""

import json
from pathlib import Path
from typing import Any

import weft

NAMES, PLACES = ("Ada", "Alan", "Grace", "Ken"), ("Paris", "Oslo", "Rome", "Lima")
SMALL: dict[str, Any] = {
    "steps": 2,
    "model.layers": 1,
    "model.d_model": 32,
    "model.attention.heads": 2,
    "model.context": 32,
}
SMALL |= {"tokenizer.kind": "wordpiece", "tokenizer.vocab_size": 50}


def _rows() -> dict[str, list[dict[str, Any]]]:
    people = [(name, place) for name in NAMES for place in PLACES]
    return {
        "classify": [{"text": f"{n} likes {p}", "label": "ab"[n < "B"]} for n, p in people],
        "entail": [{"a": f"{n} is in {p}", "b": f"{p} has {n}", "label": "xyz"[len(p) % 3]} for n, p in people],
        "regress": [{"text": f"{n} likes {p}", "score": float(len(n + p))} for n, p in people],
        "tag": [{"words": [n, "likes", p], "tags": ["PER", "O", "LOC"]} for n, p in people],
        "answer": [
            {"question": f"where is {n}?", "context": f"Here {n} is in {p}. Bob is out.", "answer": p}
            for n, p in people
        ],
        "contrastive": [{"first": f"{n} is in {p}", "second": f"{p} has {n}"} for n, p in people],
    }


def train_predictors(folder: Path) -> Path:
    """Train one run of each kind, named after its objective, and `entail`, which reads pairs; return their folder."""
    for name, rows in _rows().items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        pair = {"objective.kind": "classify", "objective.text": "a", "objective.second": "b"}
        objective = pair if name == "entail" else {"objective.kind": name}
        run = folder / "runs" / name
        weft.train("bert-tiny", data=str(data), run=run, changes=SMALL | objective, log=lambda line: None)
    return folder / "runs"
