"""Messages and progress bars on standard error, drawn only on a terminal; pauses, at which long work can be stopped."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from time import monotonic
from typing import Literal

from rich import progress as rich
from rich.console import Console

from weft.storage.untrusted import printable

Advance = Callable[[int], None]
Log = Callable[[str], None]
MIN_REDRAW_SECONDS = 0.1  # between two redraws of a bar, which may advance a million times a second
# text that no line break may divide: a number and its unit; a command in backquotes, or followed by options, paths,
# assignments and words in capitals
UNBREAKABLE = re.compile(
    r"\d (?:s|[KMG]i?B)\b|`[^`]*`|"
    r"\bweft (?:(?:runs|config) )?[a-z]+(?: (?:[^\s;,]*[-/=._\d][^\s;,]*|[A-Z]+)(?![^\s;,]))+"
)


_on_pause: ContextVar[Callable[[], None]] = ContextVar("on_pause", default=lambda: None)


def pause() -> None:
    """Let the caller of long work do something else, or end the work with an error; called between its steps."""
    _on_pause.get()()


@contextmanager
def pausing(on_pause: Callable[[], None]) -> Iterator[None]:
    """Have every `pause` of this thread call `on_pause` inside the `with` block."""
    token = _on_pause.set(on_pause)
    try:
        yield
    finally:
        _on_pause.reset(token)


def log_to_stderr(line: str) -> None:
    """Print a message to standard error, wrapped on a terminal; results go to standard output."""
    line = printable(line)
    print(wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def wrapped(line: str) -> str:
    """Wrap a message to the width of the terminal, between words but not inside a command."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(20, shutil.get_terminal_size().columns)
    joined = UNBREAKABLE.sub(lambda match: match[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts).replace("\0", " ")


@cache
def warn(line: str) -> None:
    """Print a warning to standard error, once per process."""
    log_to_stderr(f"weft: {line}")


class Bar:
    """A progress bar on a terminal. Calling it with a number advances it by that much."""

    def __init__(self, progress: rich.Progress, title: str, total: int | None):
        self._progress, self._task = progress, progress.add_task(printable(title), total=total, note="")
        self._waiting, self._drawn = 0, 0.0

    def __call__(self, done: int) -> None:
        self._waiting += done
        if (now := monotonic()) > self._drawn + MIN_REDRAW_SECONDS:
            self._progress.advance(self._task, self._waiting)
            self._waiting, self._drawn = 0, now

    def at(self, done: int) -> None:
        """Move to `done` items, forwards or backwards."""
        if (now := monotonic()) > self._drawn + MIN_REDRAW_SECONDS:
            self._progress.update(self._task, completed=done)
            self._drawn = now

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=printable(text))

    def print(self, line: str) -> None:
        self._progress.console.print(wrapped(printable(line)), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def drawn_bar(title: str, total: int | None, unit: Literal["items", "bytes"] = "items") -> Iterator[Bar | None]:
    """Yield a bar for `total` items (None: unknown), or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    speed, text = rich.TaskProgressColumn(show_speed=True), rich.TextColumn("{task.description}", markup=False)
    sizes = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if unit == "bytes" else (speed,)
    note = rich.TextColumn("{task.fields[note]}", markup=False)
    columns = (text, rich.BarColumn(), *sizes, note, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, title, total)


@contextmanager
def bar(
    title: str, total: int | None, *, unit: Literal["items", "bytes"] = "items", enabled: bool = True
) -> Iterator[Advance]:
    """Yield the function that advances a bar, which does nothing if none is drawn."""
    with drawn_bar(title, total, unit) if enabled else nullcontext() as shown:
        yield shown or (lambda done: None)
