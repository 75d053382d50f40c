"""A progress bar with its rate and the time left: on standard error, and only where that is a terminal."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from time import monotonic
from typing import Literal

from rich import progress as rich
from rich.console import Console

from weft.storage.untrusted import printable

Advance = Callable[[int], None]
Log = Callable[[str], None]
DRAWN = 0.1  # seconds between two drawings: what advances a million times a second need not be drawn so often
# what no line breaks: a number and its unit; a command in quotes, or with options, paths, assignments and words in
# capitals behind it
WHOLE = re.compile(
    r"\d (?:s|[KMG]i?B)\b|`[^`]*`|"
    r"\bweft (?:(?:runs|config) )?[a-z]+(?: (?:[^\s;,]*[-/=._\d][^\s;,]*|[A-Z]+)(?![^\s;,]))+"
)


def log_to_stderr(line: str) -> None:
    """A message for a person, kept away from results on standard output: one line in a pipe, wrapped on a terminal."""
    line = printable(line)
    print(wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def wrapped(line: str) -> str:
    """A message as lines that fit the terminal, broken between words but not inside a command."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(20, shutil.get_terminal_size().columns)
    joined = WHOLE.sub(lambda whole: whole[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts).replace("\0", " ")


@cache
def warn(line: str) -> None:
    """A warning on standard error; the same one is printed once a process."""
    log_to_stderr(f"weft: {line}")


class Bar:
    """A bar that is drawn. Called with a number, it moves on by that much."""

    def __init__(self, progress: rich.Progress, what: str, total: int | None):
        self._progress, self._task = progress, progress.add_task(printable(what), total=total, note="")
        self._waiting, self._drawn = 0, 0.0

    def __call__(self, done: int) -> None:
        self._waiting += done
        if (now := monotonic()) > self._drawn + DRAWN:
            self._progress.advance(self._task, self._waiting)
            self._waiting, self._drawn = 0, now

    def at(self, done: int) -> None:
        """Move to where `done` are done, which may be back."""
        if (now := monotonic()) > self._drawn + DRAWN:
            self._progress.update(self._task, completed=done)
            self._drawn = now

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=printable(text))

    def print(self, line: str) -> None:
        self._progress.console.print(wrapped(printable(line)), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def drawn(what: str, total: int | None, unit: Literal["items", "bytes"] = "items") -> Iterator[Bar | None]:
    """A bar for `total` items (None: unknown); yields None where there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    speed, what_it_is = rich.TaskProgressColumn(show_speed=True), rich.TextColumn("{task.description}", markup=False)
    sizes = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if unit == "bytes" else (speed,)
    note = rich.TextColumn("{task.fields[note]}", markup=False)
    columns = (what_it_is, rich.BarColumn(), *sizes, note, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, what, total)


@contextmanager
def bar(
    what: str, total: int | None, *, unit: Literal["items", "bytes"] = "items", wanted: bool = True
) -> Iterator[Advance]:
    """Yields the function that moves a bar on, whether it is drawn or not."""
    with drawn(what, total, unit) if wanted else nullcontext() as shown:
        yield shown or (lambda done: None)
