"""Runners of commands, in this process and on a terminal."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from weft.cli.main import run

Patch = pytest.MonkeyPatch


class Cli:
    """Runs commands; `err` is what the last one wrote to standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys, self.err = capsys, ""

    def _run(self, words: tuple[object, ...]) -> tuple[int, str]:
        self.capsys.readouterr()
        code = run([str(word) for word in words])
        out, self.err = self.capsys.readouterr()
        return code, out

    def __call__(self, *words: object) -> str:
        """Return the standard output of a command that succeeds."""
        code, out = self._run(words)
        assert code == 0, self.err
        return out

    def logged(self, *words: object) -> str:
        """Return the standard error of a command that succeeds."""
        self(*words)
        return self.err

    def json(self, *words: object) -> Any:
        """Return the value that a command prints with --json."""
        return json.loads(self(*words, "--json"))

    def json_lines(self, *words: object) -> list[Any]:
        """Return the values of the lines of JSON that a command prints."""
        return [json.loads(line) for line in self(*words).splitlines()]

    def refused(self, *words: object) -> str:
        """Return the message of a command that is refused in one line; training may log other lines before it."""
        code, out = self._run(words)
        *earlier, line = self.err.splitlines()
        assert code == 2 and not out and line.startswith("weft: ") and "Traceback" not in self.err
        assert not earlier or "train" in words, self.err
        return line.removeprefix("weft: ")


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Return what Python, called with these arguments, writes to a terminal."""
    pty = pytest.importorskip("pty")
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    assert process.wait() == 0
    return shown.decode()
