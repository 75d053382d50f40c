"""Word alignments of pairs: read from a column, and compared with the attention of a trained model."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.spread import spread

import weft
from weft.evaluate.alignment import word_numbers
from weft.text.config import Byte
from weft.text.grammars.rng import Rng
from weft.text.tokenizer import build_tokenizer

TINY = {"model.d_model": 16, "model.context": 24, "batch.length": 24, "batch.tokens": 256, "steps": 2}
ALIGNED = {"objective.alignment": "links", "data.validation.fraction": 0.2, "compile": False}


def write_rows(path: Path, count: int = 40, links: str | None = None) -> Path:
    """Write pairs of words and their reversal, with the alignment of the reversal unless `links` is given."""
    rng = Rng("reversed")
    with path.open("w") as file:
        for _ in range(count):
            words = [rng.pick("abcdefgh") * rng.between(1, 3) for _ in range(rng.between(2, 5))]
            alignment = " ".join(f"{i}-{len(words) - 1 - i}" for i in range(len(words)))
            row = {"source": " ".join(words), "target": " ".join(words[::-1]), "links": links or alignment}
            print(json.dumps(row), file=file)
    return path


@pytest.mark.parametrize("preset", spread(["bahdanau-tiny", "vaswani-tiny"], 1))
@pytest.mark.parametrize("tokenizer", spread(["word", "char"], 1))
def test_attention_is_evaluated_with_every_tokenizer(preset: str, tokenizer: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    changes = {**TINY, **ALIGNED, "tokenizer": tokenizer}
    run = weft.train(preset, data=data, run=tmp_path / "run", changes=changes, log=lambda _: None)
    metrics = run.evaluate()
    low, high = metrics["intervals"]["alignment_error"]
    assert 0 <= low <= metrics["alignment_error"] <= high <= 1
    assert "chrf" in metrics["intervals"]


def test_without_the_setting_there_is_no_alignment(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", links="not an alignment")
    changes = {**TINY, "tokenizer": "word", "data.validation.fraction": 0.2, "compile": False}
    run = weft.train("bahdanau-tiny", data=data, run=tmp_path / "run", changes=changes, log=lambda _: None)
    assert "alignment_error" not in run.evaluate()


def test_a_wrong_alignment_names_its_row(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", links="0-9")
    with pytest.raises(weft.WeftError, match=r"rows.jsonl:1: alignment '0-9': the target has \d words, counted from 0"):
        weft.train("bahdanau-tiny", data=data, run=tmp_path / "run", changes={**TINY, **ALIGNED}, log=lambda _: None)


@given(st.lists(st.text("aé-'", min_size=1, max_size=5), min_size=1, max_size=6))
def test_every_token_has_a_word(words: list[str]) -> None:
    tokenizer = build_tokenizer(Byte(), [])
    text = " ".join(words)
    numbers = word_numbers(text, tokenizer.token_spans(text))
    assert numbers == sorted(numbers) and set(numbers) == set(range(len(words)))


@pytest.mark.slow
def test_english_and_french_are_translated_and_aligned(tmp_path: Path) -> None:
    run = weft.train("english-french-bahdanau", run=tmp_path / "run", log=lambda _: None)
    metrics = run.evaluate()
    assert metrics["bleu"] >= 95
    (area,) = run.translate(["the European Economic Area was"])
    assert "zone économique européenne" in area


@pytest.mark.slow
def test_next_sentences_of_stories_are_predicted(tmp_path: Path) -> None:
    changes = {
        "steps": 1500,
        "data.validation.fraction": 0.4,
        "model.d_model": 64,
        "model.feedforward.d_ff": 128,
        "model.dropout": 0,
        "model.attention.dropout": 0,
        "batch.size": 32,
        "batch.length": 32,
        "optimizer.lr": 0.003,
    }
    run = weft.train("bert-tiny", data="builtin:stories", run=tmp_path / "run", changes=changes, log=lambda _: None)
    assert run.evaluate()["next_accuracy"] >= 0.9
