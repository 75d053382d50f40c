"""`weft embed` and `weft neighbours`, on a run of two steps."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from weft.api.load import load
from weft.cli.main import run

SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=32"]
SMALL += ["batch.length=16", "batch.size=4", "steps=2", "tokenizer.kind=word", "data.validation.kind=none"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text("the frog sat by the bank of the river and the bank lends money\n" * 30)
    options = ["--data", str(folder / "book.txt"), "--run", str(folder / "run")]
    assert run(["train", "llama-tiny", *options, *SMALL]) == 0
    return folder / "run"


def test_vectors_to_stdout_and_to_files(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the frog\nthe bank of the river\n")
    capsys.readouterr()
    assert run(["embed", str(trained), str(texts)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == ["the frog", "the bank of the river"]
    loaded = load(trained)
    expected = loaded.embed(["the frog", "the bank of the river"])
    assert np.array([line["vector"] for line in lines]) == pytest.approx(expected, abs=1e-6)

    assert run(["embed", str(trained), str(texts), "--out", str(tmp_path / "v.npy"), "--pooling", "last", "--raw"]) == 0
    assert "2 vectors of 16 dimensions" in capsys.readouterr().err
    last = loaded.embed(texts.read_text().split("\n")[:2], pooling="last", normalise=False)
    assert np.load(tmp_path / "v.npy") == pytest.approx(last, abs=1e-6)
    assert run(["embed", str(trained), str(texts), "--out", str(tmp_path / "v.jsonl")]) == 0
    assert (tmp_path / "v.jsonl").read_text().splitlines()[0].startswith('{"text": "the frog", "vector": [')


def test_texts_from_standard_input(trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(content: bytes) -> int:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        capsys.readouterr()
        return run(["embed", str(trained)])

    assert read(b"the frog\nthe river\n") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    for content, message in ((b"the frog\n\n", "line 2: empty"), (b"", "contains no text"), (b"\xff\xfe", "UTF-16")):
        assert read(content) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pooling", "men"], "--pooling men: did you mean 'mean'?"),
        (["--out", "v.txt"], "--out v.txt: expected a name that ends in .npy or .jsonl"),
    ],
)
def test_mistakes_of_embed(trained: Path, words: list[str], message: str, capsys: Capture) -> None:
    assert run(["embed", str(trained), "nowhere.txt", *words]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_or_written(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["embed", str(trained), str(tmp_path / "nowhere.txt")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "texts.txt").write_text("the frog\n")
    out = tmp_path / "texts.txt" / "v.npy"
    assert run(["embed", str(trained), str(tmp_path / "texts.txt"), "--out", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_neighbours_of_a_word(trained: Path, capsys: Capture) -> None:
    assert run(["neighbours", str(trained), "frog", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["nearest", "to", "frog", "cosine"]
    assert len(lines) == 4
    assert run(["neighbours", str(trained), "frog", "--top", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [near["text"] for near in found["neighbours"]] == [line.split()[0] for line in lines[1:]]


def test_neighbours_in_sentences(trained: Path, capsys: Capture) -> None:
    sentences = ["--text", "by the bank of the river", "--text", "the bank lends money"]
    assert run(["neighbours", str(trained), "bank", *sentences, "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "by the [bank] of the river" in out and "the [bank] lends money" in out
    assert run(["neighbours", str(trained), "bank", *sentences, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["sentence"], each["start"]) for each in found] == [(0, 7), (1, 4)]
    assert len(found[0]["neighbours"]) == 9


def test_rated_pairs(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("frog\tbank\t2\nriver\tbank\t8\nfrog\triver\t5\nfrog\ttadpole\t9\n")
    assert run(["neighbours", str(trained), "--pairs", str(file)]) == 0
    out = capsys.readouterr().out
    assert "over 3 pairs" in out and "1 pair left out: 1 word without a vector (tadpole)" in out
    assert run(["neighbours", str(trained), "--pairs", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == ["tadpole"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a WORD, or a file of rated pairs"),
        (["frog", "--pairs", "x"], "give either a WORD"),
        (["--pairs", "x", "--text", "y"], "--text and --top need a WORD"),
        (["--pairs", "x", "--top", "3"], "--text and --top need a WORD"),
        (["tadpole"], "'tadpole' is not in the vocabulary"),
        (["frog", "--text", "the river"], "'frog' is in none of the 1 sentences"),
        (["--pairs", "nowhere.tsv"], "nowhere.tsv: cannot be read"),
    ],
)
def test_mistakes_of_neighbours(trained: Path, words: list[str], message: str, capsys: Capture) -> None:
    assert run(["neighbours", str(trained), *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
