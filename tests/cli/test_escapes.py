"""Escape sequences from files and models are escaped before they reach a terminal."""

import sys
from pathlib import Path

from tests.command import Cli, Patch, on_a_terminal

from weft.cli.console import terminal
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


def test_error_messages_are_escaped(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.csv").write_text(f"one,[red]{EVIL}\n1,2\n")
    printed = cli.refused("prepare", tmp_path / "a.csv", "--out", tmp_path / "out")
    assert r"its columns: one, [red]\x1b]0;owned\x07\x1b[2J\x9b31m" in printed
    assert printed.rstrip("\n").isprintable()


def test_output_is_escaped_only_on_a_terminal(monkeypatch: Patch) -> None:
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
    words = ["tokenize", f"a{EVIL}b", "--tokenizer", "byte", "--json"]
    shown = on_a_terminal("-m", "weft", *words, COLUMNS="200")
    assert "pieces" in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)
