"""Prepared data is verified by checksums; unchanged files are hashed once."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.data.held import write_examples

from weft.data import shards
from weft.data.config import TextSource
from weft.data.examples import verify_files
from weft.data.prepare import prepare
from weft.data.shards import Shards
from weft.errors import DataError
from weft.storage import files
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
    """Set the files' times back by an hour."""
    for file in folder.iterdir():
        os.utime(file, (file.stat().st_mtime - 3600,) * 2)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["train-00000.tokens", "train-00001.sections", "validation-00000.sections"])
@pytest.mark.parametrize("verified", [False, True])
def test_a_flipped_bit_is_detected(folder: Path, name: str, verified: bool) -> None:
    if verified:
        Shards.open(folder).verify()
    flip(folder / name, 24)
    with pytest.raises(DataError, match=rf"{name}: damaged: the checksum is wrong"):
        Shards.open(folder).verify()


def test_the_index_has_a_checksum(folder: Path) -> None:
    file = folder / "index.json"
    file.write_text(file.read_text().replace('"documents": ', '"documents": 1', 1))
    with pytest.raises(DataError, match=r"index\.json: damaged"):
        Shards.open(folder)


def test_unchanged_files_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock(side_effect=files.open_regular)
    monkeypatch.setattr(files, "open_regular", opened)

    def hashed() -> list[str]:
        opened.reset_mock()
        Shards.open(folder).verify()
        names = [call.args[0].name for call in opened.call_args_list]
        return [name for name in names if name != shards.VERIFIED and name.startswith(("train", "validation"))]

    assert len(hashed()) == 2 * len(Shards.open(folder).index.shards)
    assert hashed() == []
    os.utime(folder / "train-00000.tokens")
    assert hashed() == ["train-00000.tokens"]


def test_recently_changed_files_are_not_recorded(folder: Path) -> None:
    os.utime(folder / "train-00000.tokens")
    Shards.open(folder).verify()
    verified = json.loads((folder / shards.VERIFIED).read_text())
    assert "train-00000.tokens" not in verified and "train-00000.sections" in verified


@pytest.mark.parametrize("record", ["", "[]", '{"train-00000.tokens": 3}', "\x00"])
def test_a_damaged_record_is_ignored(folder: Path, record: str) -> None:
    (folder / shards.VERIFIED).write_text(record)
    flip(folder / "train-00000.tokens", 5)
    with pytest.raises(DataError, match="damaged"):
        Shards.open(folder).verify()


def test_a_read_only_folder_is_verified_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "write_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    Shards.open(folder).verify()
    flip(folder / "train-00000.tokens", 5)
    with pytest.raises(DataError, match="damaged"):
        Shards.open(folder).verify()


@pytest.mark.parametrize("name", ["train-00000.tokens", "validation-00000.sections", "index.json", "tokenizer.json"])
def test_preparing_again_repairs(folder: Path, text: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (folder / name).read_bytes()
    flip(folder / name, len(content) // 2)
    prepare(TextSource([str(text)]), folder, BYTES, shard_tokens=4000)
    assert (folder / name).read_bytes() == content
    assert "preparing it again" in capsys.readouterr().err


def test_every_flipped_bit_of_examples_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "train.safetensors"
    write_examples(file, [{"text": [n, 2, 3], "label": n % 2} for n in range(20)], notes={"tokenizer": "ab"})
    content = file.read_bytes()
    verify_files([file])
    for at in range(0, len(content), 7):
        flip(file, at)
        with pytest.raises(DataError, match=r"train\.safetensors: "):
            verify_files([file])
        file.write_bytes(content)
    file.write_bytes(bytes(len(content)))
    with pytest.raises(DataError, match=r"train\.safetensors: damaged"):
        verify_files([file])
