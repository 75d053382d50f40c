"""A bar for work that lasts, with its rate and the time left: on standard error, and only where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int], None]
DRAWN = 0.1  # seconds between two drawings


@contextmanager
def bar(
    what: str, total: int | None, *, unit: Literal["items", "bytes"] = "items", wanted: bool = True
) -> Iterator[Advance]:
    """Yields the function that moves the bar on by so many; `total` is None where nobody knows it beforehand."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda done: None
        return
    sizes = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (TaskProgressColumn(show_speed=True),)
    columns = (TextColumn("{task.description}"), BarColumn(), *sizes, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        waiting, drawn = 0, 0.0

        def advance(done: int) -> None:
            nonlocal waiting, drawn
            waiting += done
            if (
                now := monotonic()
            ) > drawn + DRAWN:  # what advances a million times a second need not be drawn so often
                shown.advance(task, waiting)
                waiting, drawn = 0, now

        yield advance


Log = Callable[[str], None]


def log_to_stderr(line: str) -> None:
    """A message for a person, kept away from results on standard output."""
    print(line, file=sys.stderr, flush=True)
