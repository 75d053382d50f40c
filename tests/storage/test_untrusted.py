"""Files from elsewhere: what is read of them, how much, and how it is shown."""

import os
from pathlib import Path

import pytest

from weft.errors import DataError, InteropError
from weft.storage.untrusted import mapped, printable, read_bytes, read_json, refuse_beyond


def test_what_a_terminal_obeys_is_spelled_out() -> None:
    assert printable("a\x1b[31mb\x07\x9b2J\x7f") == r"a\x1b[31mb\x07\x9b2J\x7f"
    assert printable("one\r\ntwo\tthree\rfour\x08") == "one\r\ntwo\tthree\\rfour\\x08"
    assert printable("left\u202eright\u2066") == r"left\u202eright\u2066"
    plain = "naïve café: 東京 🙂 שלום \u200f▁"
    assert printable(plain) == plain


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        for read in (read_bytes, mapped):
            with pytest.raises(InteropError, match=f"{name}: cannot be read: not a file"):
                read(tmp_path / name)


def test_sizes_come_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "long.json", "wb") as file:
        file.truncate(10**11)  # takes no room on the disk
    with pytest.raises(InteropError, match=r"100,000,000,000 bytes are too many .*WEFT_LIMITS=1491 raises it"):
        read_json(tmp_path / "long.json")
    refuse_beyond(10, 10, "ten")
    with pytest.raises(DataError, match="eleven; the bound is 10 "):
        refuse_beyond(11, 10, "eleven", DataError)
    monkeypatch.setenv("WEFT_LIMITS", "1.5")
    refuse_beyond(11, 10, "eleven")


def test_half_a_character_is_none(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(r'{"a": "\ud83d\ude42"}')
    assert read_json(tmp_path / "whole.json") == {"a": "🙂"}
    (tmp_path / "half.json").write_text(r'{"a": "\ud83d"}')
    with pytest.raises(InteropError, match=r"half\.json: contains a lone surrogate, which is not a character"):
        read_json(tmp_path / "half.json")
