"""Printing texts, tables and JSON, and a message while the heavy libraries are imported.

Names of columns and tensors, labels and generated texts are untrusted. A terminal obeys escape sequences, so they are
escaped for a terminal, and always on standard error; files and pipes get them unchanged.
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

MIN_PROSE_WIDTH, MAX_PROSE_WIDTH = 20, 120  # columns at which titles and remarks are wrapped
STYLES: dict[str, dict[str, Any]] = {"title": {"bold": True}, "header": {"dim": True}, "remark": {"dim": True}}


def escaped(text: str) -> str:
    """Escape a text for standard output if that is a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a line, on standard output or standard error."""
    typer.echo(printable(text) if err else escaped(text), nl=nl, err=err)


def write(text: str) -> None:
    """Print a part of a line immediately."""
    sys.stdout.write(escaped(text))
    sys.stdout.flush()


def print_tables(*tables: Table) -> None:
    """Print tables with an empty line between them, fitted to the width of a terminal."""
    # NO_COLOR forbids styles, FORCE_COLOR allows them in a pipe; None: only on a terminal
    coloured = False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None
    width = terminal_width()
    prose = max(MIN_PROSE_WIDTH, min(width or MAX_PROSE_WIDTH, MAX_PROSE_WIDTH))
    for number, table in enumerate(tables):
        if number:
            typer.echo()
        header, *rows = (list(map(escaped, row)) for row in (table.header, *table.rows))
        title, remarks = escaped(table.title), list(map(escaped, table.remarks))
        safe = table._replace(header=header, rows=rows, title=title, remarks=remarks)
        for part, line in text_lines(safe, width, prose):
            typer.secho(line, color=coloured, **STYLES.get(part, {}))


def print_json(value: Any) -> None:
    """Print one JSON document."""
    from weft.runs.lines import to_json

    typer.echo(json.dumps(to_json(value), ensure_ascii=False, indent=2, allow_nan=False))


def wrap_words(parts: Iterable[str], width: int) -> Iterator[str]:
    """Wrap a streamed text: yield its words and spaces, and line breaks before words that do not fit."""
    column, pending = 0, ""
    for part in chain(parts, [None]):
        pending += part or ""
        words = re.findall(r"\s|\S+", pending)
        # the last word may be incomplete; one that fills a line is written anyway
        incomplete = part is not None and bool(words) and not words[-1].isspace() and len(words[-1]) < width
        pending = words.pop() if incomplete else ""
        for word in words:
            if word == "\n":
                column = 0
            elif column + len(word) > width and not word.isspace():
                yield "\n"
                column = len(word)
            else:
                column += len(word)
            yield word


def terminal_width() -> int | None:
    """Return the width of the terminal; None if standard output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def loading() -> Iterator[None]:
    """Show a message on the terminal while a command imports torch inside the `with` block.

    Imported objects live until the end, so they are exempt from garbage collection, which would take half a second.
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
