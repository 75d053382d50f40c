"""Untrusted files: what is read, how much of it, and how it is printed."""

import os
from pathlib import Path

import pytest

from weft.errors import DataError, InteropError
from weft.storage.untrusted import map_file, printable, read_bytes, read_json, refuse_beyond


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31mb\x07\x9b2J\x7f") == r"a\x1b[31mb\x07\x9b2J\x7f"
    assert printable("one\r\ntwo\tthree\rfour\x08") == "one\r\ntwo\tthree\\rfour\\x08"
    assert printable("left\u202eright\u2066") == r"left\u202eright\u2066"
    plain = "naïve café: 東京 🙂 שלום \u200f▁"
    assert printable(plain) == plain


def test_reading_a_pipe_or_a_device_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        for read in (read_bytes, map_file):
            with pytest.raises(InteropError, match=f"{name}: cannot be read: not a file"):
                read(tmp_path / name)


def test_sizes_are_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "long.json", "wb") as file:
        file.truncate(10**11)  # sparse: takes no space on the disk
    with pytest.raises(InteropError, match=r"100,000,000,000 bytes are too many .*WEFT_LIMITS=1491 raises it"):
        read_json(tmp_path / "long.json")
    refuse_beyond(10, 10, "ten")
    with pytest.raises(DataError, match="eleven; the bound is 10 "):
        refuse_beyond(11, 10, "eleven", kind=DataError)
    monkeypatch.setenv("WEFT_LIMITS", "1.5")
    refuse_beyond(11, 10, "eleven")


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(r'{"a": "\ud83d\ude42"}')
    assert read_json(tmp_path / "whole.json") == {"a": "🙂"}
    (tmp_path / "half.json").write_text(r'{"a": "\ud83d"}')
    with pytest.raises(InteropError, match=r"half\.json: contains a lone surrogate, which is not a character"):
        read_json(tmp_path / "half.json")
