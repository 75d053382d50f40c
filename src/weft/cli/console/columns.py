"""Tables as plain text in columns, quick to print: whole in a pipe, and fitted to the width of a terminal."""

import json
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import typer

from weft.cli.console.terminal import shown, terminal_width

NARROWEST = 16  # characters that a column of text is left with, whatever the terminal's width
WRAPPED = 36  # a column that is wider may be wrapped, so it need not be left out
WIDEST = 120  # of a remark


def show(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    remarks: Sequence[str] = (),
    text: Sequence[int] = (0,),
) -> None:
    """Print rows under a header, if it has any names, then remarks; columns without anything in them are left out.

    Columns numbered in `text` stand to the left, all others to the right. On a terminal that is too narrow the widest
    of those in `text` is wrapped between its words.
    """
    table, width = [[shown(cell) for cell in row] for row in (header, *rows)], terminal_width()
    widths = _widths(table)
    if width is not None and (over := _line(widths) - width) > 0:
        widest = max(text, key=lambda column: widths[column])
        widths[widest] = max(NARROWEST, widths[widest] - over)
    if title:
        print_wrapped(title, bold=True)
    for number, row in enumerate(table):
        if any(row):
            for line in _lines(row, widths, text):
                typer.secho(line, dim=True if number == 0 else None)
    for remark in remarks:
        print_wrapped(remark, dim=True)


def without(
    spare: Sequence[int], header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]], list[str]]:
    """A table in which columns of `spare` are empty, the first one first, where the terminal is too narrow for all.

    And a remark that says so, if there are any.
    """
    table, width, gone = [list(row) for row in (header, *rows)], terminal_width(), []
    for column in spare:
        if width is None or _line([min(each, WRAPPED) for each in _widths(table)]) <= width:
            break
        gone.append(header[column])
        for row in table:
            row[column] = ""
    remarks = [f"not shown for lack of space: {', '.join(gone)}; --json has all"] if gone else []
    return table[0], table[1:], remarks


def _line(widths: Sequence[int]) -> int:
    """How long a line of cells is, with two spaces between them."""
    return sum(width + 2 for width in widths if width) - 2


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _lines(row: Sequence[str], widths: Sequence[int], text: Sequence[int]) -> list[str]:
    """A row of cells as one line, or as more where a cell is wider than its column; no word is broken."""
    cells = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) if len(cell) > width else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    return [
        "  ".join(
            part.ljust(width) if column in text else part.rjust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
            if width
        ).rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]


def print_wrapped(text: str, **style: Any) -> None:
    """Print a paragraph, on a terminal wrapped between words."""
    width = max(20, min(terminal_width() or WIDEST, WIDEST))
    for line in textwrap.wrap(shown(text), width, break_long_words=False, break_on_hyphens=False):
        typer.secho(line, **style)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    from weft.runs.lines import finite

    typer.echo(json.dumps(finite(value), ensure_ascii=False, indent=2, allow_nan=False))
