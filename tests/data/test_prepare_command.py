"""The `weft prepare` command."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from weft.cli.prepare import prepare
from weft.data.shards import Shards
from weft.data.sources import read_documents
from weft.errors import DataError, WeftError
from weft.text.tokenizer import Tokenizer

app = typer.Typer()
app.command()(prepare)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n} of the text\n" for n in range(500)))
    return file


def test_the_command_writes_a_folder_and_reports_it(tmp_path: Path, text: Path) -> None:
    done = run(text, "--out", tmp_path / "out", "--vocab", "280")
    assert done.exit_code == 0, done.output
    shards = Shards.open(tmp_path / "out")
    assert shards.validation is not None
    assert Tokenizer.load(shards.path).vocab_size == 280
    for part in (f"{len(shards.train):,}", f"{len(shards.validation):,}", shards.fingerprint[:16], "written to"):
        assert part in done.output


def test_an_existing_tokenizer_and_validation_files(tmp_path: Path, text: Path) -> None:
    run(text, "--out", tmp_path / "first", "--tokenizer", "char", "--validation", "0")
    first = Shards.open(tmp_path / "first")
    assert first.validation is None
    (tmp_path / "held.jsonl").write_text(json.dumps({"body": "line 9"}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": "line 3"}))
    options = ("--validation", tmp_path / "held.jsonl", "--column", "body", "--tokenizer", tmp_path / "first")
    done = run(tmp_path / "rows.jsonl", "--out", tmp_path / "second", *options)
    assert done.exit_code == 0, done.output
    second = Shards.open(tmp_path / "second")
    assert second.index.tokenizer == first.index.tokenizer
    assert second.validation is not None and second.validation.bytes == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bpee"], "did you mean 'bpe'"),
        (["--tokenizer", "byte", "--vocab", "99"], "--vocab 99: the vocabulary of a byte tokenizer is fixed"),
        (["--tokenizer", __file__, "--vocab", "99"], "is a finished tokenizer; its vocabulary is fixed"),
        (["--validation", "1.5"], "--validation: fraction = 1.5"),
        (["--validation", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--vocab", "0"], "--vocab: vocab_size = 0"),
        (["--part", "3"], "--part 3: expected NUMBER/COUNT, such as 3/16"),
        (["--part", "0/4"], "--part 0/4: expected"),
        (["--part", "5/4"], "--part 5/4: expected"),
        (["--part", "1/2"], "weft prepare FILE --tokenizer bpe --out first, and give --tokenizer first"),
        (["--merge", "--vocab", "9"], "--vocab 9: the parts are already prepared; leave it out with --merge"),
        (["--merge"], "no such folder"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, text: Path, options: list[str], message: str) -> None:
    done = run(text, "--out", tmp_path / "out", *options)
    assert isinstance(done.exception, WeftError) and message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_text_in_parts(tmp_path: Path, text: Path) -> None:
    assert run(text, "--out", tmp_path / "whole", "--vocab", "280").exit_code == 0
    for number in (1, 2):
        options = ("--part", f"{number}/2", "--tokenizer", tmp_path / "whole", "--out", tmp_path / str(number))
        assert run(text, *options, "--jobs", "1").exit_code == 0
    done = run("--merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    assert Shards.open(tmp_path / "merged").fingerprint == Shards.open(tmp_path / "whole").fingerprint
    assert Shards.open(tmp_path / "whole").fingerprint[:16] in done.output


def test_a_prepared_folder_is_not_a_source_of_text(tmp_path: Path, text: Path) -> None:
    assert run(text, "--out", tmp_path / "out", "--tokenizer", "byte").exit_code == 0
    with pytest.raises(DataError, match=r"train on them with data\.prepared="):
        list(read_documents([str(tmp_path / "out")]))
