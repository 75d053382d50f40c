"""Escape sequences from files and models are escaped before they reach a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.console import terminal
from weft.cli.main import run
from weft.figures.tables import Table

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m"


class Terminal:
    """Standard output that claims to be a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_error_messages_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(f"one,[red]{EVIL}\n1,2\n")
    assert run(["prepare", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert r"its columns: one, [red]\x1b]0;owned\x07\x1b[2J\x9b31m" in printed
    assert printed.rstrip("\n").isprintable()


def test_output_is_escaped_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.write(f"model says {EVIL}\n\tmore")
    terminal.print_tables(Table(("label", EVIL), [(EVIL, "1")], title=EVIL, remarks=[EVIL]))
    assert EVIL not in screen.text
    assert "\x1b]" not in screen.text and "\x1b[2J" not in screen.text and "\x9b" not in screen.text
    assert r"model says \x1b]0;owned\x07" in screen.text and "\n\tmore" in screen.text
    monkeypatch.setattr(screen, "isatty", lambda: False)
    screen.text = ""
    terminal.write(EVIL)
    assert screen.text == EVIL  # files get the text unchanged


def test_tokens_are_escaped_on_a_real_terminal() -> None:
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "weft", "tokenize", f"a{EVIL}b", "--tokenizer", "byte", "--json"]
    process = subprocess.Popen(words, stdout=follower, stderr=follower, env={**os.environ, "COLUMNS": "200"})
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 0 and b"pieces" in shown
    assert b"\x1b" not in shown and b"\x07" not in shown and "\x9b".encode() not in shown
