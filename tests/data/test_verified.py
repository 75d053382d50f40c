"""Prepared data is what was written, or it is refused; while nothing changes, that is found out once."""

import json
import os
from pathlib import Path

import pytest

from weft.data import shards
from weft.data.config import TextSource
from weft.data.examples import verify_files, write_sides
from weft.data.prepare import prepare
from weft.data.shards import Shards
from weft.errors import DataError
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

BYTES = build_tokenizer(Byte(), [])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {number} of a text\n" for number in range(900)), encoding="utf-8")
    return file


@pytest.fixture
def folder(tmp_path: Path, text: Path) -> Path:
    prepare(TextSource([str(text)]), tmp_path / "prepared", BYTES, shard_tokens=4000)
    age(tmp_path / "prepared")
    return tmp_path / "prepared"


def age(folder: Path) -> None:
    """As if the files had been written an hour ago."""
    for file in folder.iterdir():
        os.utime(file, (file.stat().st_mtime - 3600,) * 2)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["train-00000.tokens", "train-00001.sections", "validation-00000.sections"])
@pytest.mark.parametrize("noted", [False, True])
def test_one_bit_is_noticed(folder: Path, name: str, noted: bool) -> None:
    if noted:
        Shards.open(folder).verify()
    flip(folder / name, 24)
    with pytest.raises(DataError, match=rf"{name}: damaged: it is not what was written"):
        Shards.open(folder).verify()


def test_the_index_knows_itself(folder: Path) -> None:
    file = folder / "index.json"
    file.write_text(file.read_text().replace('"documents": ', '"documents": 1', 1))
    with pytest.raises(DataError, match=r"index\.json: damaged"):
        Shards.open(folder)


def test_it_costs_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    blocks = shards.file_blocks
    monkeypatch.setattr(shards, "file_blocks", lambda path: read.append(path.name) or blocks(path))
    Shards.open(folder).verify()
    assert len(read) == 2 * len(Shards.open(folder).index.shards)
    read.clear()
    Shards.open(folder).verify()
    assert read == []
    os.utime(folder / "train-00000.tokens")  # a new time: it is read again, and found to be whole
    Shards.open(folder).verify()
    assert read == ["train-00000.tokens"]


def test_what_was_just_written_is_not_noted(folder: Path) -> None:
    os.utime(folder / "train-00000.tokens")
    Shards.open(folder).verify()
    noted = json.loads((folder / shards.NOTE).read_text())
    assert "train-00000.tokens" not in noted and "train-00000.sections" in noted


@pytest.mark.parametrize("note", ["", "[]", '{"train-00000.tokens": 3}', "\x00"])
def test_a_damaged_note_is_no_note(folder: Path, note: str) -> None:
    (folder / shards.NOTE).write_text(note)
    flip(folder / "train-00000.tokens", 5)
    with pytest.raises(DataError, match="damaged"):
        Shards.open(folder).verify()


def test_a_folder_that_cannot_be_written_is_verified_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shards, "write_text", refuse)
    Shards.open(folder).verify()
    flip(folder / "train-00000.tokens", 5)
    with pytest.raises(DataError, match="damaged"):
        Shards.open(folder).verify()


@pytest.mark.parametrize("name", ["train-00000.tokens", "validation-00000.sections", "index.json", "tokenizer.json"])
def test_the_same_prepare_mends_a_damaged_folder(
    folder: Path, text: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (folder / name).read_bytes()
    flip(folder / name, len(whole) // 2)
    prepare(TextSource([str(text)]), folder, BYTES, shard_tokens=4000)
    assert (folder / name).read_bytes() == whole
    assert "preparing it again" in capsys.readouterr().err


def test_examples_know_every_bit(tmp_path: Path) -> None:
    file = tmp_path / "train.safetensors"
    examples = [("train", {"text": [number, 2, 3], "label": number % 2}) for number in range(20)]
    write_sides({"train": file}, examples, notes={"tokenizer": "ab"})  # type: ignore[arg-type]
    whole = file.read_bytes()
    verify_files([file])
    for at in range(0, len(whole), 7):
        flip(file, at)
        with pytest.raises(DataError, match=r"train\.safetensors: "):
            verify_files([file])
        file.write_bytes(whole)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(DataError, match=r"train\.safetensors: damaged"):
        verify_files([file])
