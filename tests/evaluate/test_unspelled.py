"""Bits per byte charges the whole text: unknown words aren't free, and the baseline stays the same."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.data import held

from weft.api.load import load
from weft.cli.main import run
from weft.evaluate.perplexity import Score
from weft.evaluate.unspelled import Spelling, spelling
from weft.runs.lines import record
from weft.text.config import Char, Word
from weft.text.tokenizer import build_tokenizer

TEXT = "".join(f"the frog number {n} sat by the river, and die Kröte {n % 7} sang.\n\n" for n in range(300))


def test_bytes_that_no_token_spells() -> None:
    text = "the frog the newt the salamander"
    words = build_tokenizer(Word(vocab_size=6), ["the frog the frog the newt"])
    assert words.unk_id is not None
    ids = words.encode(text)
    found = spelling(held.tokens(np.array(ids), [0], [len(text)]), words)
    unknown = ids.count(words.unk_id)
    assert 0 < unknown < len(ids) and found.unknown == unknown
    missing = sum(len(f" {word}") for word in text.split() if words.encode(word) == [words.unk_id])
    assert abs(found.unspelled - missing) <= 1  # the first word has no space before it
    assert not found.exact
    letters = build_tokenizer(Char(), [text])
    spelled = spelling(held.tokens(np.array(letters.encode(text)), [0], [len(text)]), letters)
    assert spelled == Spelling(len(text), len(text), 0, 0, len(text), begins=1) and spelled.exact


def test_unspelled_bytes_cost_eight_bits_each() -> None:
    score = Score(nats=math.log(2) * 10, tokens=5, bytes=20, unknown=2, unspelled=15)
    assert score.bits_per_byte == pytest.approx((10 + 8 * 15) / 20)
    assert score.unknown_share == 0.4
    assert score.loss == pytest.approx(math.log(2) * 2)  # the loss per token is unchanged
    both = Score.total([score, Score(0.0, 5, 20)])
    assert (both.unknown, both.unspelled, both.tokens) == (2, 15, 10)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """N-gram models of the same text with three tokenizers."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    tokenizers = {"few": ["tokenizer=word", "tokenizer.vocab_size=6"], "all": ["tokenizer=word"], "bpe": []}
    for name, words in tokenizers.items():
        assert run(["train", "ngram-3", "--data", str(folder / "book.txt"), "--run", str(folder / name), *words]) == 0
    return {name: folder / name for name in tokenizers}


def test_a_small_vocabulary_has_no_advantage(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = {}
    for name, path in runs.items():
        assert run(["evaluate", str(path), "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["few"]["unknown_share"] > 0.5 > found["all"]["unknown_share"] >= found["bpe"]["unknown_share"] == 0.0
    # most bytes of the text cost 8 bits
    assert found["few"]["bits_per_byte"] > 4.0 > found["all"]["bits_per_byte"]
    baselines = [metrics["baseline_bits_per_byte"] for metrics in found.values()]
    assert baselines == pytest.approx([baselines[0]] * 3, abs=0.005)
    assert run(["evaluate", str(runs["few"])]) == 0
    assert "unknown tokens" in capsys.readouterr().out


def test_there_is_no_baseline_without_the_text(runs: dict[str, Path]) -> None:
    loaded = load(runs["few"])
    book = runs["few"].parent / "book.txt"
    try:
        book.write_text(TEXT[::-1] + "more", encoding="utf-8")
        metrics = loaded.objective.final_evaluation(loaded.model).metrics
    finally:
        book.write_text(TEXT, encoding="utf-8")
    assert "baseline_bits_per_byte" not in metrics and metrics["bits_per_byte"] > 4.0


def test_json_has_no_nan_at_any_depth() -> None:
    assert json.loads(record({"a": math.nan, "b": {"c": [1.0, math.inf]}})) == {"a": None, "b": {"c": [1.0, None]}}
