"""`weft embed` and `weft neighbours`, on a run of two steps."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.command import Cli, Patch

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


def test_vectors_to_stdout_and_to_files(trained: Path, tmp_path: Path, cli: Cli) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the frog\nthe bank of the river\n")
    lines = [json.loads(line) for line in cli("embed", trained, texts).splitlines()]
    assert [line["text"] for line in lines] == ["the frog", "the bank of the river"]
    loaded = load(trained)
    expected = loaded.embed(["the frog", "the bank of the river"])
    assert np.array([line["vector"] for line in lines]) == pytest.approx(expected, abs=1e-6)

    cli("embed", trained, texts, "--out", tmp_path / "v.npy", "--pooling", "last", "--raw")
    assert "2 vectors of 16 dimensions" in cli.err
    last = loaded.embed(texts.read_text().split("\n")[:2], pooling="last", normalise=False)
    assert np.load(tmp_path / "v.npy") == pytest.approx(last, abs=1e-6)
    cli("embed", trained, texts, "--out", tmp_path / "v.jsonl")
    assert (tmp_path / "v.jsonl").read_text().splitlines()[0].startswith('{"text": "the frog", "vector": [')


def test_texts_from_standard_input(trained: Path, cli: Cli, monkeypatch: Patch) -> None:
    def stdin(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))

    stdin(b"the frog\nthe river\n")
    assert len(cli("embed", trained).splitlines()) == 2
    for content, message in ((b"the frog\n\n", "line 2: empty"), (b"", "contains no text"), (b"\xff\xfe", "UTF-16")):
        stdin(content)
        assert message in cli.refused("embed", trained)


def test_files_that_cannot_be_read_or_written(trained: Path, tmp_path: Path, cli: Cli) -> None:
    assert "no such file" in cli.refused("embed", trained, tmp_path / "nowhere.txt")
    (tmp_path / "texts.txt").write_text("the frog\n")
    out = tmp_path / "texts.txt" / "v.npy"
    assert "cannot be written" in cli.refused("embed", trained, tmp_path / "texts.txt", "--out", out)


def test_neighbours_of_a_word(trained: Path, cli: Cli) -> None:
    lines = cli("neighbours", trained, "frog", "--top", "3").splitlines()
    assert lines[0].split() == ["nearest", "to", "frog", "cosine"]
    assert len(lines) == 4
    found = cli.json("neighbours", trained, "frog", "--top", "3")
    assert [near["text"] for near in found["neighbours"]] == [line.split()[0] for line in lines[1:]]


def test_neighbours_in_sentences(trained: Path, cli: Cli) -> None:
    sentences = ["--text", "by the bank of the river", "--text", "the bank lends money"]
    out = cli("neighbours", trained, "bank", *sentences, "--top", "2")
    assert "by the [bank] of the river" in out and "the [bank] lends money" in out
    found = [json.loads(line) for line in cli("neighbours", trained, "bank", *sentences, "--json").splitlines()]
    assert [(each["sentence"], each["start"]) for each in found] == [(0, 7), (1, 4)]
    assert len(found[0]["neighbours"]) == 9


def test_rated_pairs(trained: Path, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("frog\tbank\t2\nriver\tbank\t8\nfrog\triver\t5\nfrog\ttadpole\t9\n")
    out = cli("neighbours", trained, "--pairs", file)
    assert "over 3 pairs" in out and "1 pair left out: 1 word without a vector (tadpole)" in out
    assert cli.json("neighbours", trained, "--pairs", file)["missing"] == ["tadpole"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("embed RUN nowhere.txt --pooling men", "--pooling men: did you mean 'mean'?"),
        ("embed RUN nowhere.txt --out v.txt", "--out v.txt: expected a name that ends in .npy or .jsonl"),
        ("neighbours RUN", "give one of: a WORD, a file of rated pairs"),
        ("neighbours RUN frog --pairs x", "give one of: a WORD"),
        ("neighbours RUN --pairs x --text y", "--text, --top and --map need a WORD"),
        ("neighbours RUN --pairs x --top 3", "--text, --top and --map need a WORD"),
        ("neighbours RUN tadpole", "'tadpole' is not in the vocabulary"),
        ("neighbours RUN frog --text river", "'frog' is in none of the 1 sentences"),
        ("neighbours RUN --pairs nowhere.tsv", "nowhere.tsv: no such file"),
    ],
)
def test_mistakes(trained: Path, command: str, message: str, cli: Cli) -> None:
    assert message in cli.refused(*command.replace("RUN", str(trained)).split())
