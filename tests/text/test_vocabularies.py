"""Vocabulary files of other programs, recognised by name and content."""

import json
from pathlib import Path

import pytest
import typer
from tests.text.conftest import TEXTS
from typer.testing import CliRunner

from weft.cli.tokenize import tokenize
from weft.errors import TokenizerError
from weft.text.config import Pretrained
from weft.text.tokenizer import Tokenizer, build_tokenizer

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es", "cafe", ",", "'"]


def write_lines(folder: Path, lines: list[str], name: str = "vocab.txt") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    return folder / name


def test_bert(tmp_path: Path) -> None:
    file = write_lines(tmp_path, BERT)
    for tokenizer in (Tokenizer.load(file), Tokenizer.load(tmp_path), build_tokenizer(Pretrained(path=str(file)))):
        assert tokenizer.kind == "wordpiece"
        assert tokenizer.roles == {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        assert tokenizer.encode("The Foxes, Café [SEP] dog") == [5, 6, 7, 9, 8, 1, 1, 1, 1]
        assert tokenizer.decode([5, 6, 7]) == "the foxes"


def test_bert_with_whole_words_or_with_capitals(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_lines(tmp_path, [piece for piece in BERT if piece != "##es"]))
    assert tokenizer.kind == "wordpiece"
    assert tokenizer.encode("The Foxes, Café") == [5, 1, 8, 7]
    cased = Tokenizer.load(write_lines(tmp_path, [*BERT, "The", "Café"]))
    assert cased.encode("The Café the cafe") == [11, 12, 5, 8]


def test_bert_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    letters = "abcdefghijklmnopqrstuvwxyz.,;!?()…0123456789"
    ours = Tokenizer.load(write_lines(tmp_path, [*BERT[:9], *letters, *(f"##{letter}" for letter in letters)]))
    theirs = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    for text in [*TEXTS[:4], "x" * 101, "a\u0301 日本 \x00b"]:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    ours.save(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("the fox")["input_ids"] == theirs("the fox")["input_ids"] == [2, *ours.encode("the fox"), 3]


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2(names: tuple[str, str], tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    model = json.loads(tokenizers["bpe"].to_json())["model"]
    vocab, merges = tmp_path / names[0], tmp_path / names[1]
    vocab.write_text(json.dumps(model["vocab"]))
    write_lines(tmp_path, ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])], names[1])
    for path in (tmp_path, vocab, merges):
        tokenizer = Tokenizer.load(path)
        assert [tokenizer.encode(text) for text in TEXTS[:4]] == [tokenizers["bpe"].encode(text) for text in TEXTS[:4]]
        assert tokenizer.eos_id == tokenizers["bpe"].eos_id
    write_lines(tmp_path, ["a zzz"], names[1])
    with pytest.raises(TokenizerError, match="line 1: 'a zzz' does not merge"):
        Tokenizer.load(tmp_path)
    vocab.write_text('{"a": 0, "b": 0}')
    with pytest.raises(TokenizerError, match="each token a distinct id"):
        Tokenizer.load(vocab)
    merges.unlink()
    with pytest.raises(TokenizerError, match=f"{names[1]}: no such file"):
        Tokenizer.load(vocab)
    vocab.write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        Tokenizer.load(vocab)


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(tokenize)
    result = CliRunner().invoke(app, ["the foxes", "--tokenizer", str(write_lines(tmp_path, BERT))])
    assert result.output == "5\t'the'\n6\t'fox'\n7\t'es'\n"


def test_a_tokenizer_json_wins_under_any_name(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    (tmp_path / "saved").write_text(tokenizers["word"].to_json())
    assert Tokenizer.load(tmp_path / "saved").kind == "word"
    write_lines(tmp_path, BERT)
    tokenizers["word"].save(tmp_path)
    assert Tokenizer.load(tmp_path).kind == "word"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not a vocab.txt"),
        (b"just\nsome\ntext\n", r"not a vocab.txt, with a piece per line and \[UNK\] among them"),
        ("\n".join([*BERT, "the"]).encode(), "'the' occurs twice in the vocabulary"),
        (b"\x00\xff\xfe\x81" * 9, "neither a SentencePiece model"),
        (b"\x80\x02}q\x00.", "neither a SentencePiece model"),
    ],
)
def test_invalid_files_are_refused_in_one_line(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(TokenizerError, match=expected) as error:
        Tokenizer.load(tmp_path / "bad.txt")
    assert "\n" not in str(error.value)
    with pytest.raises(TokenizerError, match="applies to rank files"):
        Tokenizer.load(write_lines(tmp_path, BERT), "gpt2")
