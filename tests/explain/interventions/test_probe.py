"""Probes: what is planted in a layer is read there, a control task is not, and labels must fit the tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_explain import RUNS
from tests.spread import spread

import weft
from weft.api.interventions import labelled_texts
from weft.errors import WeftError
from weft.explain.interventions.probe import LabelledSpan, layer_taps, probe

WORDS = ["cat", "dog", "sat", "ran", "the", "hat", "mat", "rat"]


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(count: int = 80) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        words = [WORDS[(number * 3 + n * 5) % 8] for n in range(3 + number % 3)]
        rows.append(
            {"words": words, "tags": ["noun" if word in WORDS[:2] or word[1:] == "at" else "other" for word in words]}
        )
    return rows


@pytest.mark.parametrize("name", spread(["gpt", "lstm", "bahdanau", "pairs", "masked-next"], 1))
def test_every_family_is_probed(name: str, tmp_path: Path) -> None:
    run = weft.load(RUNS / name)
    known = {"bahdanau": ["cat", "dog", "runs", "sleeps", "the", "red", "blue", "fast"]}.get(name, WORDS)
    rows = [
        {"words": [dict(zip(WORDS, known, strict=True))[w] for w in row["words"]], "tags": row["tags"]}
        for row in rows_of()
    ]
    found: Any = run.explain.probe(table(tmp_path, rows))
    assert [layer.layer for layer in found.layers] == list(layer_taps(run.model))
    assert all(0 <= layer.label <= 1 and layer.selectivity == layer.label - layer.control for layer in found.layers)
    assert found.layers[0].label > found.baseline + 0.05  # a word's tag can be read off the word itself
    assert "selectivity" in found.text()


def test_a_planted_label_is_read_where_it_was_planted() -> None:
    """A label that only layer 1 knows is read there, and not below."""
    run: Any = weft.load(RUNS / "gpt")
    texts = [f"{WORDS[n % 8]} {WORDS[(n // 8) % 8]}" for n in range(64)] * 2
    draw = torch.Generator().manual_seed(0)
    planted = torch.randint(2, (len(texts),), generator=draw).tolist()
    readings = [run.explain.reading(text) for text in texts]
    spans = [LabelledSpan(n, 0, len(text), "ab"[planted[n]]) for n, text in enumerate(texts)]
    last, calls = f"decoder.{run.config.model.layers - 1}.residual", iter(planted)

    def plant(x: torch.Tensor) -> torch.Tensor:
        return x + 5.0 * (2 * next(calls) - 1)

    with run.patch({last: plant}):
        found = probe(readings, texts, spans)
    probes = {layer.layer: layer for layer in found.layers}
    assert probes["embedding"].label < 0.8 < probes[f"layer {run.config.model.layers - 1}"].label


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"words": ["a", "b"], "tags": ["x"]}], "labels.jsonl:1: 2 words and 1 tags; each word needs one tag"),
        ([{"words": ["cat"], "tags": ["x"]}] * 60, "60 words of 60 texts, 12 of them held out: a probe needs"),
        ([{"words": ["a", "c"] * 7, "tags": ["x", "y"] * 7}] * 4, "56 words of 4 texts, 0 of them held out"),
        ([{"words": ["cat"], "tags": ["x"]}, {"words": ["dog"], "tags": ["y"]}], "2 labels on 2 words of 2 texts"),
        ([{"sentence": "cat"}], "no column"),
        ([{"text": "the [cat] [sat]", "label": "x"}], "labels.jsonl:1: 2 words are in brackets"),
        ([{"text": "cat", "label": "x"}, {"text": "the " * 40, "label": "y"}], "labels.jsonl: text 2: the text has"),
    ],
)
def test_labels_that_do_not_fit(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeftError) as error:
        weft.load(RUNS / "gpt").explain.probe(table(tmp_path, rows))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_labels_of_words_that_no_token_spells(tmp_path: Path) -> None:
    rows = [{"words": ["zyx", "qqq"], "tags": ["x", "y"]}] * 60
    with pytest.raises(WeftError, match="no labelled word has a token of this model"):
        weft.load(RUNS / "bahdanau").explain.probe(table(tmp_path, rows))


def test_unknown_labels() -> None:
    with pytest.raises(WeftError, match=r"did you mean .*builtin:number"):
        weft.load(RUNS / "gpt").explain.probe("builtin:numbr")
    with pytest.raises(WeftError, match="give a table of labels with --labels"):
        weft.load(RUNS / "gpt").explain.probe()


@pytest.mark.parametrize("name", ["number", "depth", "tag", "sense"])
def test_built_in_labels_are_read(name: str) -> None:
    texts, spans = labelled_texts(f"builtin:{name}")
    assert len(texts) >= 180 and len({span.label for span in spans}) > 1
    assert all(texts[span.text][span.start : span.end].strip() for span in spans)
