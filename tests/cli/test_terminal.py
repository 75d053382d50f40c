"""Output on a terminal: tables and messages fit its width, and no word or command is broken."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.command import Cli, Patch

from weft import progress
from weft.cli.console import terminal
from weft.cli.main import COMMANDS
from weft.config import merge, validate
from weft.figures.tables import Table
from weft.models.presets import PRESETS
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_presets_fit_the_terminal(width: int, cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setattr(terminal, "terminal_width", lambda: width)
    lines = cli("presets").splitlines()
    assert not any("…" in line for line in lines)
    if width >= 80:
        assert max(map(len, lines)) <= width
    named = [line.split()[0] for line in lines if not line.startswith(" ") and line]
    assert named[: 1 + len(PRESETS)] == ["preset", *PRESETS]
    assert "params" in lines[0]
    assert ("FLOPs/tok" in lines[0]) == (width == 120)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "words", [["plan", "gpt2"], ["plan", "--lecture", "gpt3"], ["runs", "diff", "gpt2", "llama-7b"]]
)
def test_tables_fit_the_terminal(words: list[str], width: int, cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.setattr(terminal, "terminal_width", lambda: None)
    whole = cli(*words)
    monkeypatch.setattr(terminal, "terminal_width", lambda: width)
    fitted = cli(*words)
    assert max(map(len, fitted.splitlines())) <= width
    assert sorted(fitted.split()) == sorted(whole.split())  # no word is cut, none is lost


def test_a_long_cell_is_wrapped_between_words(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(terminal, "terminal_width", lambda: 30)
    table = Table(("a", "b"), [("one", "weft train --resume runs/a-very-long-name resumes")], text=(0, 1))
    terminal.print_tables(table)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "one  weft train --resume",
        "     runs/a-very-long-name",
        "     resumes",
    ]


def test_json_has_no_nan(capsys: Capture) -> None:
    terminal.print_json({"a": float("nan"), "b": [1.5, float("inf")], "c": Path("x")})
    assert "".join(capsys.readouterr().out.split()) == '{"a":null,"b":[1.5,null],"c":"x"}'


@pytest.mark.parametrize("command", ["generate", "train", "translate", "plan", "explain", "evaluate", "runs"])
def test_help_shows_values_in_one_word(command: str, cli: Cli) -> None:
    out = cli(*command.split(), "--help")
    assert not re.search(r"<(bool|list|int|str|float|path)", out)
    assert "x>=" not in out and "SOURCE]" not in out
    assert "--help" in out


EVERY = [word.rstrip("_") for names in COMMANDS.values() for word in names.split()]


@pytest.mark.parametrize("command", [*EVERY, "config show", "config schema"])
def test_help_reads_as_prose(command: str, cli: Cli, monkeypatch: Patch) -> None:
    """Paragraphs are filled; there are no braces around required arguments."""
    monkeypatch.setenv("COLUMNS", "80")
    usage, *prose = cli(*command.split(), "--help").partition("╭")[0].strip().splitlines()
    assert "{" not in usage
    assert max(map(len, (usage, *prose))) <= 80
    for line, following in itertools.pairwise(each.strip() for each in prose):
        if line and following:
            assert len(line) + 1 + len(following.split()[0]) > 78, f"a break after {line!r}"


def test_config_show_marks_settings_that_are_chosen(cli: Cli) -> None:
    text = cli("config", "show", "gpt-tiny")
    assert "# steps: chosen from the text\n" in text
    assert "# optimizer: chosen for the machine\n" in text
    assert "# optimizer.lr: chosen from the text\n" in text
    assert "# size: chosen from the text\n" in text[text.index("[batch]") : text.index("[evaluate]")]
    assert validate(Recipe, tomllib.loads(text)) == resolve("gpt-tiny")
    text = cli("config", "show", "gpt-tiny", "steps=5", "optimizer.lr=0.1", "batch.size=2")
    assert "# steps" not in text
    assert "# lr" not in text
    assert "# size" not in text
    for name in ("sentiment", "ngram-3", "quickstart", "dates", "bert-tiny"):
        assert validate(Recipe, merge({}, tomllib.loads(cli("config", "show", name)))) == resolve(name)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_a_message_is_shown_while_torch_is_loaded() -> None:
    """Only on a terminal, where it disappears afterwards."""
    import pty

    inside = "with loading():\n    pass\nsys.exit('torch' in sys.modules)"
    code = f"import sys; from weft.cli.console.terminal import loading\n{inside}"
    inner, outer = pty.openpty()
    assert subprocess.run([sys.executable, "-c", code], stderr=outer).returncode == 0
    shown = b""
    while not shown.endswith(b"\x1b[K"):  # may come in parts
        shown += os.read(inner, 4096)
    assert shown.decode() == "loading torch …\r\x1b[K"
    for handle in (inner, outer):
        os.close(handle)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stderr == b""


def test_messages_break_between_words_and_never_inside_a_command(capsys: Capture, monkeypatch: Patch) -> None:
    line = "weft: runs/x: a run is already here; continue it with `weft train --resume runs/x`, or choose another"
    progress.log_to_stderr(line)
    assert capsys.readouterr().err == f"{line}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    progress.log_to_stderr(line)
    assert capsys.readouterr().err.splitlines() == [
        "weft: runs/x: a run is already here; continue it with",
        "  `weft train --resume runs/x`, or choose another",
    ]
    progress.log_to_stderr("pre-flight: a step, an evaluation and a check took no more 0.7 s, so")
    assert capsys.readouterr().err.splitlines()[0].endswith("no more")
    progress.log_to_stderr("a run; to train its weights further: weft train runs/x --data FILE; to continue it, others")
    assert capsys.readouterr().err.splitlines() == [
        "a run; to train its weights further:",
        "  weft train runs/x --data FILE; to continue it, others",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_messages_above_a_progress_bar_are_wrapped(width: int, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    with progress.drawn_bar("training", 2) as bar:
        assert bar is not None
        bar.print("a checkpoint could not be written; `weft train --resume runs/x` continues from the last one")
    lines = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).replace("\r", "\n").splitlines()
    assert any("weft train --resume runs/x" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_replies_are_wrapped_between_words() -> None:
    text = "A reply  that comes\nin parts, one aftertheotherandthisonetoolong for a line."
    for size in (1, 3, 100):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        lines = "".join(terminal.wrap_words(iter(parts), 16)).split("\n")
        assert "".join(lines) == text.replace("\n", "")
        assert [line.strip() for line in lines[:3]] == ["A reply  that", "comes", "in parts, one"]


@pytest.mark.slow
def test_explain_parallel_fits_80_columns(cli: Cli) -> None:
    assert max(map(len, cli("explain", "parallel").splitlines())) <= 80
