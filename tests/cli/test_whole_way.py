"""From a text file to a trained model that generates text, through the commands."""

import json
import shlex
from pathlib import Path

import pytest
from tests.cli.conftest import write_book
from tests.command import Cli, Patch

from weft.api import train as api
from weft.api.load import load
from weft.cli.main import run
from weft.data.config import NoSplit
from weft.errors import ConfigError, DataError, RunError
from weft.runs.lines import read_lines
from weft.text.config import BPE, Byte, Char
from weft.text.grammars.sentences import TALES
from weft.text.tokenizer import build_tokenizer

SMALL = ["model.layers=1", "model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=32"]
SMALL += ["batch.length=16", "batch.size=4", "steps=6", "tokenizer.kind=byte"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, trained by the command."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_book(folder / "book.txt")
    assert run(["train", "llama-tiny", "--data", str(text), "--run", str(folder / "run"), *SMALL]) == 0
    return folder / "run"


def test_files_of_a_run(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.toml", "tokenizer.json", "metrics.jsonl", "events.jsonl", "checkpoints", "report.html"} <= names
    result = [line for line in read_lines(trained / "events.jsonl") if line["event"] == "result"]
    assert result[0]["bits_per_byte"] > 0
    assert len(result[0]["samples"]) == 3


def test_evaluate_repeats_the_final_evaluation(trained: Path, cli: Cli) -> None:
    metrics = cli.json("evaluate", trained)
    ended = load(trained).results()
    assert metrics["loss"] == pytest.approx(ended["loss"], rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(ended["bits_per_byte"], rel=1e-6)
    # each token is a byte, except the ends of texts
    assert metrics["bytes"] <= metrics["tokens"] <= metrics["bytes"] + 2
    assert "bits per byte" in cli("evaluate", trained)


def test_evaluate_on_other_text(trained: Path, tmp_path: Path, cli: Cli) -> None:
    first, second = write_book(tmp_path / "a.txt", 1), write_book(tmp_path / "b.txt", 2)
    both = json.loads(cli("evaluate", trained, "--json", "--data", first, second))
    assert both["bytes"] == first.stat().st_size + second.stat().st_size
    near = json.loads(cli("evaluate", trained, "--json", "--data", first, "--stride", "8"))
    assert near["bytes"] == first.stat().st_size
    assert "stride = 17" in cli.refused("evaluate", trained, "--stride", "17")


def test_generate_is_reproducible_and_stops(trained: Path, cli: Cli) -> None:
    def write(*words: str) -> str:
        return cli("generate", trained, "--prompt", "The cat", "--max-tokens", "40", *words)

    first = write("--seed", "3")
    assert first.startswith("The cat")
    assert first == write("--seed", "3")
    assert first != write("--seed", "4")
    assert write("--greedy") == write("--temperature", "0", "--seed", "9")
    stop = first[len("The cat") + 5]
    assert write("--seed", "3", "--stop", stop) == first[: first.index(stop, len("The cat"))] + "\n"


def test_the_saved_recipe_repeats_the_run(trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert run(["train", str(trained / "config.toml"), "--run", str(again)]) == 0
    assert (again / "metrics.jsonl").read_text() == (trained / "metrics.jsonl").read_text()
    weights = "checkpoints/latest/model.safetensors"
    assert (again / weights).read_bytes() == (trained / weights).read_bytes()


def test_the_default_folder_is_a_free_one(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    text = str(write_book(tmp_path / "book.txt"))
    table = {"tokenizer": {"kind": "char"}}
    first = api.train("ngram-3", data=text, changes=table)
    second = api.train("ngram-3", data=text, changes=table)
    assert (first.path.name, second.path.name) == ("ngram-3", "ngram-3-2")
    assert first.results()["bits_per_byte"] < first.results()["baseline_bits_per_byte"]
    assert first.generate("The ", max_tokens=8, seed=1) == second.generate("The ", max_tokens=8, seed=1)
    with pytest.raises(RunError, match="already here"):
        api.train("ngram-3", data=text, changes=table, run=first.path)


def test_quickstart_twice(tmp_path: Path, monkeypatch: Patch, cli: Cli) -> None:
    """On a short text and with a small model; the second run takes another folder."""
    monkeypatch.chdir(tmp_path)
    write_book(tmp_path / "book.txt")
    words = ["quickstart", *SMALL, 'data.sources=["book.txt"]']
    shown = cli(*words)
    for part in ("three generated texts", "bits per byte of character frequencies", "report.html", "weft generate"):
        assert part in shown
    events = read_lines(tmp_path / "runs" / "quickstart" / "events.jsonl")
    assert next(line for line in events if line["event"] == "start")["command"] == shlex.join(["weft", *words])
    assert run(words) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["quickstart", "quickstart-2"]


def test_a_short_text_gets_the_vocabulary_it_supports(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one two three four five six seven eight nine ten. " * 60)
    lines: list[str] = []
    changes = [*SMALL[:-1], "steps=2", "data.validation.kind=tail"]
    done = api.train("llama-tiny", data=[str(text)], run=tmp_path / "run", changes=changes, log=lines.append)
    assert any("all that this text supports" in line for line in lines)
    size = done.tokenizer.vocab_size
    assert isinstance(done.config.tokenizer, BPE)
    assert done.config.model.vocab_size == size == done.config.tokenizer.vocab_size


def test_prepared_data_is_not_copied(tmp_path: Path) -> None:
    text = write_book(tmp_path / "book.txt")
    api.prepare(str(text), tmp_path / "data", tokenizer=Byte(), validation=NoSplit())
    table = {"data": {"prepared": str(tmp_path / "data")}}
    changes = [*SMALL[:-1], "steps=2", f"data.prepared={tmp_path / 'data'}"]
    done = api.train("llama-tiny", run=tmp_path / "run", changes=changes)
    assert not (tmp_path / "run" / "data").exists()
    assert done.tokenizer.kind == "byte"
    with pytest.raises(DataError, match="this run has no held-out data"):
        done.perplexity()
    assert done.evaluate(str(text))["perplexity"] > 1
    with pytest.raises(ConfigError, match="was prepared with another tokenizer"):
        api.train("llama-tiny", run=tmp_path / "other", changes={**table, "tokenizer": {"kind": "char"}})
    build_tokenizer(Char(), ["abc"]).save(tmp_path / "tokenizer.json")
    another = {"kind": "pretrained", "path": str(tmp_path / "tokenizer.json")}
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        api.train("llama-tiny", run=tmp_path / "other", changes={**table, "tokenizer": another})
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_quickstart_learns_to_copy_names(seed: int, tmp_path: Path) -> None:
    done = api.train("quickstart", run=tmp_path / "run", changes={"seed": seed})
    assert done.results()["bits_per_byte"] < 0.2
    for name in ("Mira", "Hugo", "Clara"):
        seen = done.explain.surprise(f"There was once a potter, {name} by name. People said that {name} was kind.")
        again = [nats for token, nats in zip(seen.tokens, seen.nats, strict=True) if token.text.strip() == name][1]
        assert again is not None and again < 0.7  # a name by chance has 2.8
    pair = done.explain.example_pair()  # with another name, another name is predicted
    assert {pair["answer"].strip(), pair["wrong"].strip()} <= {*TALES["she"], *TALES["he"]}
