"""The command `weft tokenize`."""

import json
from pathlib import Path

import pytest
import typer
from tests.text.conftest import TEXTS
from typer.testing import CliRunner, Result

from weft.cli.tokenize import tokenize
from weft.errors import WeftError
from weft.text.tokenizer import Tokenizer

app = typer.Typer()
app.command()(tokenize)


def run(*words: str, **options: object) -> Result:
    return CliRunner().invoke(app, list(words), **options)  # type: ignore[arg-type]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    return str(tmp_path / "corpus.txt")


def test_without_a_terminal_there_is_a_line_per_token() -> None:
    result = run("aé\n", "--tokenizer", "byte")
    assert result.output == "100\t'a'\n198\t'<0xC3>'\n172\t'<0xA9>'\n13\t'\\n'\n"


def test_colours_ids_and_counts_on_a_terminal() -> None:
    result = run("a\x1b[5m\nb", "--tokenizer", "byte", "--ids", env={"FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert "\x1b[5m" not in result.output  # a text can't control the terminal
    assert "\\x1b" in result.output
    assert " 100 " in result.output
    assert "⏎" in result.output
    assert "7 tokens, 7 characters, 7 bytes, 1.00 bytes per token" in result.output


@pytest.mark.parametrize("kind", ["word", "char", "bpe", "wordpiece", "unigram"])
def test_kinds_are_trained_on_data(kind: str, corpus: str) -> None:
    answer = json.loads(run("the quick fox", "--tokenizer", kind, "--data", corpus, "--json").output)
    assert "".join(piece["text"] for piece in answer["pieces"]).replace(" ", "").endswith("thequickfox"[1:])
    assert answer["tokens"] == len(answer["pieces"])
    assert (answer["characters"], answer["bytes"]) == (13, 13)
    assert answer["bytes_per_token"] == pytest.approx(13 / answer["tokens"], abs=1e-4)


def test_a_file_and_standard_input_are_tokenized(corpus: str, tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizers["bpe"].save(tmp_path / "run")
    expected = tokenizers["bpe"].encode("\n".join(TEXTS))
    for result in (
        run(corpus, "--tokenizer", str(tmp_path / "run")),
        run("-", "--tokenizer", str(tmp_path / "run" / "tokenizer.json"), input="\n".join(TEXTS)),
    ):
        assert [int(line.split("\t")[0]) for line in result.output.splitlines()] == expected


def test_the_vocabulary_can_be_chosen(corpus: str) -> None:
    few, many = (len(run(corpus, "--data", corpus, "--vocab", size).output.splitlines()) for size in ("260", "330"))
    assert many < few


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--tokenizer", "bype"], "not a kind of tokenizer, a file or a folder; did you mean"),
        (["x", "--tokenizer", "byte", "--vocab", "300"], "the vocabulary of a byte tokenizer is fixed"),
        (["x", "--tokenizer", "byte", "--data", "book.txt"], "the tokenizer byte needs no training"),
        (["x", "--tokenizer", ".", "--vocab", "300"], "is a finished tokenizer; its vocabulary is fixed"),
        (["\ud800", "--tokenizer", "byte"], "lone surrogate"),
    ],
)
def test_contradictory_options_are_refused(words: list[str], message: str) -> None:
    error = run(*words).exception
    assert isinstance(error, WeftError)
    assert message in str(error)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ok\xff")
    error = run(str(tmp_path / "binary"), "--tokenizer", "byte").exception
    assert isinstance(error, WeftError)
    assert "not UTF-8 text: invalid start byte at byte 2" in str(error)


@pytest.mark.parametrize(
    ("text", "noted"),
    [("nix.txt", True), ("a/b.json.gz", True), ("./nix", True), ("U.S.A", False), ("Well. Then", False), ("hi", False)],
)
def test_the_name_of_a_missing_file_is_read_as_text_with_a_note(text: str, noted: bool) -> None:
    result = run(text, "--tokenizer", "byte", "--json")
    assert json.loads(result.stdout)["characters"] == len(text)
    assert ("no such file; the name itself is tokenized" in result.stderr) == noted
