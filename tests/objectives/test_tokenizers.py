"""A run refuses a tokenizer other than the one that made its tokens."""

import json
import shutil
from pathlib import Path

import pytest
from tests.spread import slow

from weft.api import train as api
from weft.api.load import load
from weft.errors import RunError

SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=16", "steps=2"]
TEXTS = [f"Frog {n} sat by the river. The dog {n * 7} ran home." for n in range(200)]


def learn(folder: Path, preset: str, *words: str) -> Path:
    rows = [json.dumps({"text": text, "label": str(len(text) % 2)}) for text in TEXTS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    changes = [*SMALL, *words]
    api.train(preset, data=str(folder / "rows.jsonl"), run=folder / "run", changes=changes, log=lambda line: None)
    return folder / "run"


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        slow(("gpt-tiny", ())),
        slow(("bert-tiny", ("batch.length=32",))),
        ("bert-tiny", ("objective=classify", "batch.length=32")),
    ],
)
def test_another_tokenizer_in_the_folder_is_noticed(tmp_path: Path, preset: str, words: tuple[str, ...]) -> None:
    run = learn(tmp_path, preset, *words)
    api.resume(run, log=lambda line: None)
    (tmp_path / "other").mkdir()
    kind, size = ("wordpiece", 150) if preset == "bert-tiny" else ("bpe", 300)
    other = learn(tmp_path / "other", preset, *words, f"tokenizer.kind={kind}", f"tokenizer.vocab_size={size}")
    shutil.copy(other / "tokenizer.json", run / "tokenizer.json")
    with pytest.raises(RunError, match=r"tokenizer\.json: not the tokenizer that this run's text was tokenized with"):
        api.resume(run, log=lambda line: None)


def test_a_model_does_not_generate_with_another_tokenizer(tmp_path: Path) -> None:
    run = learn(tmp_path, "gpt-tiny")
    (tmp_path / "other").mkdir()
    other = learn(tmp_path / "other", "gpt-tiny", "tokenizer.kind=bpe", "tokenizer.vocab_size=300")
    shutil.copy(other / "tokenizer.json", run / "tokenizer.json")
    with pytest.raises(RunError, match="not the tokenizer that this run's text was tokenized with"):
        load(run)
    shutil.rmtree(run / "data")  # without the data the difference is not known
    load(run)
