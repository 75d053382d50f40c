"""`weft translate`, on a model of two steps: its options, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command import Cli, Patch

from weft.api import load as api
from weft.api.settings import beam
from weft.cli.main import run
from weft.data.batch import Source, pad
from weft.decode import translate as decoding
from weft.decode.config import Beam

Capture = pytest.CaptureFixture[str]
TINY = ["steps=2", "batch.length=12", "model.d_model=16", "model.layers=1", "tokenizer=char"]
LINES = "b a c\n\nc c a b\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    rows = [" ".join("abc"[(n >> k) % 3] for k in range(1 + n % 5)) for n in range(120)]
    for name in ("read.txt", "write.txt"):
        (folder / name).write_text("\n".join(rows) + "\n")
    (folder / "lines.txt").write_text(LINES)
    files = ["--data", str(folder / "read.txt"), "--targets", str(folder / "write.txt")]
    assert run(["train", "bahdanau-tiny", *files, "--run", str(folder / "run"), *TINY]) == 0
    return folder / "run"


def translated(cli: Cli, trained: Path, *words: object) -> str:
    return cli("translate", trained, trained.parent / "lines.txt", *words)


def test_a_line_for_every_line(trained: Path, cli: Cli, tmp_path: Path) -> None:
    out = translated(cli, trained)
    assert out.count("\n") == 3 and out.split("\n")[1] == "" and out.split("\n")[0]
    assert translated(cli, trained, "--out", str(tmp_path / "new" / "out.txt")) == ""
    assert (tmp_path / "new" / "out.txt").read_text() == out


def test_lines_of_json(trained: Path, cli: Cli) -> None:
    plain = translated(cli, trained).split("\n")[:-1]
    found = [json.loads(line) for line in translated(cli, trained, "--json").splitlines()]
    assert [each["text"] for each in found] == LINES.splitlines()
    assert [each["translation"] for each in found] == plain


def test_every_option_reaches_the_search(trained: Path, cli: Cli, monkeypatch: Patch) -> None:
    searches: list[Beam] = []
    search = decoding.search_texts

    def recorded(model: Any, prompts: Any, settings: Beam, **others: Any) -> object:
        searches.append(settings)
        return search(model, prompts, settings, **others)

    monkeypatch.setattr(decoding, "search_texts", recorded)
    options = "--beam 3 --length-penalty 0.5 --coverage-penalty 2 --max-tokens 5 --patience 2"
    translated(cli, trained, *options.split())
    translated(cli, trained)
    power = {"kind": "power", "alpha": 0.5}
    assert searches[0] == beam(beams=3, length_penalty=power, coverage_penalty=2.0, max_tokens=5, patience=2.0)
    assert searches[-1] == beam(beams=5, max_tokens=12, patience=1.0)


def test_special_tokens_are_read_on_request(trained: Path, cli: Cli, monkeypatch: Patch) -> None:
    read: list[list[int]] = []
    answers = decoding.Translator._answers

    def recorded(self: decoding.Translator, source: Source, settings: Beam, texts: list[str]) -> list[str]:
        read.extend(source.tokens.tolist())
        return answers(self, source, settings, texts)

    monkeypatch.setattr(decoding.Translator, "_answers", recorded)
    (trained.parent / "specials.txt").write_text("a <eos> b\n")
    eos = api.load(trained).tokenizer.need("eos")
    for words, found in ([], 1), (["--special-tokens"], 2):
        read.clear()
        cli("translate", trained, trained.parent / "specials.txt", *words)
        assert read[0].count(eos) == found


def test_the_coverage_penalty_lowers_scores(trained: Path) -> None:
    loaded = api.load(trained)
    source = Source(*pad([[*loaded.tokenizer.encode("a b c"), loaded.tokenizer.need("eos")]], 0))

    def best(penalty: float) -> float:
        settings = beam(beams=1, coverage_penalty=penalty, max_tokens=3)
        opening = [decoding.Prompt.of(loaded.tokenizer, [loaded.tokenizer.need("bos")])]
        found = decoding.search_texts(loaded.model, opening, settings, source=source)[0][0].score
        assert found is not None
        return found

    assert best(5.0) < best(1.0) < best(0.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--length-penalty nan", "length_penalty.alpha = nan: expected a finite number"),
        ("--length-penalty 11", "length_penalty.alpha = 11.0: expected a number less than or equal to 10"),
        ("--coverage-penalty 11", "coverage_penalty = 11.0: expected a number less than or equal to 10"),
        ("--patience 0", "patience = 0.0: expected a number greater than 0"),
        ("--beam 1 --patience 2", "--patience 2.0: a beam of 1 compares no scores; leave it out"),
        ("--beam 5000", "beams = 5000: expected a number less than or equal to 1000"),
        (
            "--max-tokens 9999999999 --beam 1",
            "max_tokens = 9999999999: expected a number less than or equal to 1000000000",
        ),
        ("--beam 1 --length-penalty 2", "--length-penalty 2.0: a beam of 1 compares no scores; leave it out"),
        ("--beam 1 --coverage-penalty 2", "--coverage-penalty 2.0: a beam of 1 compares no scores; leave it out"),
        ("--from de", "--from de: {run} has no tokens for languages; leave it out"),
        ("--to de", "--to de: {run} has no tokens for languages; leave it out"),
    ],
)
def test_invalid_options_are_one_line(trained: Path, words: str, line: str, cli: Cli) -> None:
    refused = cli.refused("translate", trained, trained.parent / "lines.txt", *words.split())
    assert refused == line.format(run=trained)


def test_an_unwritable_output_is_refused_first(trained: Path, tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setattr("weft.api.run.Run.translate", None)  # must not be called
    (tmp_path / "file").write_text("")
    for out, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "out.txt", "is not a folder")):
        assert why in cli.refused("translate", trained, trained.parent / "lines.txt", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", ["b a c\nc c a b", "b a c\nc c a b\n", "b a c\r\nc c a b\r\n"])
def test_line_ends_are_not_translated(trained: Path, tmp_path: Path, cli: Cli, content: str) -> None:
    (tmp_path / "in.txt").write_bytes(content.encode())
    rows = cli.json_lines("translate", trained, tmp_path / "in.txt", "--json")
    assert [row["text"] for row in rows] == ["b a c", "c c a b"]
    assert [row["translation"] for row in rows] == api.load(trained).translate(["b a c", "c c a b"])
