"""Printing: texts, tables and JSON, and a sign of life while the heavy libraries are imported.

Names of columns and tensors, labels, and what a model writes are anybody's text. A terminal obeys escape sequences, so
it gets them spelled out. Into a file or a pipe they go as they are; standard error is for a person in any case.
"""

import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import typer

from weft.figures.tables import Table, text_lines
from weft.storage.untrusted import printable

MIN_PROSE_WIDTH, MAX_PROSE_WIDTH = 20, 120  # columns that titles and remarks are wrapped at
STYLES: dict[str, dict[str, Any]] = {"title": {"bold": True}, "header": {"dim": True}, "remark": {"dim": True}}


def shown(text: str) -> str:
    """A text as standard output takes it."""
    return printable(text) if sys.stdout.isatty() else text


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text."""
    typer.echo(printable(text) if err else shown(text), nl=nl, err=err)


def write(text: str) -> None:
    """Print a part of a text at once."""
    sys.stdout.write(shown(text))
    sys.stdout.flush()


def print_tables(*tables: Table) -> None:
    """Print tables with an empty line between them: whole in a pipe, and fitted to the width of a terminal."""
    width = terminal_width()
    prose = max(MIN_PROSE_WIDTH, min(width or MAX_PROSE_WIDTH, MAX_PROSE_WIDTH))
    for number, table in enumerate(tables):
        if number:
            typer.echo()
        safe = table._replace(header=list(map(shown, table.header)), rows=[list(map(shown, row)) for row in table.rows])
        safe = safe._replace(title=shown(table.title), remarks=list(map(shown, table.remarks)))
        for part, line in text_lines(safe, width, prose):
            typer.secho(line, color=coloured(), **STYLES.get(part, {}))


def coloured() -> bool | None:
    """Whether lines may be styled: NO_COLOR forbids it, FORCE_COLOR wants it in a pipe too; None asks the terminal."""
    return False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None


def print_json(value: Any) -> None:
    """Print one JSON document."""
    from weft.runs.lines import to_json

    typer.echo(json.dumps(to_json(value), ensure_ascii=False, indent=2, allow_nan=False))


def broken_between_words(parts: Iterable[str], width: int) -> Iterator[str]:
    """A text that comes in parts, word by word, with line ends before words that no longer fit; spaces stay."""
    column, waiting = 0, ""
    for part in chain(parts, [None]):
        waiting += part or ""
        pieces = re.findall(r"\s|\S+", waiting)
        # the last word may not be whole yet; one that fills a line is written as far as it is
        held = part is not None and bool(pieces) and not pieces[-1].isspace() and len(pieces[-1]) < width
        waiting = pieces.pop() if held else ""
        for piece in pieces:
            if piece == "\n":
                column = 0
            elif column + len(piece) > width and not piece.isspace():
                yield "\n"
                column = len(piece)
            else:
                column += len(piece)
            yield piece


def terminal_width() -> int | None:
    """The columns of the terminal that standard output is; None where it isn't one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def loading() -> Iterator[None]:
    """Import what a command needs inside: on a terminal something shows that it happens, and leaves no trace.

    What is imported stays for good, so nobody looks for garbage in it, now or later: that took half a second.
    """
    if "torch" in sys.modules:
        yield
        return
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        sys.stderr.write("loading torch …")
        sys.stderr.flush()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
