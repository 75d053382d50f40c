"""Tables: described once, here set in plain text; `figures/page.py` has them on a page."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

WIDTH = 80
MIN_TEXT_WIDTH = 16  # characters that a column of text is left with, however narrow the terminal
WRAPPED_WIDTH = 36  # a column that is wider may be wrapped, so it need not be left out


class Table(NamedTuple):
    """Columns numbered in `text` stand to the left, all others to the right; those without anything are left out.

    Where there is too little space, columns of `spare` are left out, the first one first.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    remarks: Sequence[str] = ()
    text: Sequence[int] = (0,)
    spare: Sequence[int] = ()


def text_lines(table: Table, width: int | None = None, prose: int = WIDTH) -> Iterator[tuple[str, str]]:
    """The lines of a table, and what each belongs to: title, header, row or remark.

    In a `width` that is too narrow, the widest of the columns in `text` is wrapped between its words. Title and remarks
    are wrapped at `prose` columns.
    """
    table = table if width is None else _without_spare(table, width)
    widths = _widths(table)
    if width is not None and (over := _line_width(widths) - width) > 0:
        widest = max(table.text, key=lambda column: widths[column])
        widths[widest] = max(MIN_TEXT_WIDTH, widths[widest] - over)
    yield from (("title", line) for line in wrapped(table.title, prose))
    for number, row in enumerate((table.header, *table.rows)):
        if any(row):
            yield from (("row" if number else "header", line) for line in _row_lines(row, widths, table.text, width))
    yield from (("remark", line) for remark in table.remarks for line in wrapped(remark, prose))


def text_table(table: Table, width: int | None = None) -> str:
    """A table in plain text."""
    return "\n".join(line for _, line in text_lines(table, width))


def text_tables(tables: Sequence[Table], width: int | None = None) -> str:
    """Several, one below another."""
    return "\n\n".join(text_table(table, width) for table in tables)


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """A paragraph in lines; no word is broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _without_spare(table: Table, width: int) -> Table:
    """The table with as many spare columns empty as it takes to fit, and a remark that says so."""
    rows, gone = [list(row) for row in (table.header, *table.rows)], []
    for column in table.spare:
        if _line_width([min(each, WRAPPED_WIDTH) for each in _widths(Table(rows[0], rows[1:]))]) <= width:
            break
        gone.append(table.header[column])
        for row in rows:
            row[column] = ""
    if not gone:
        return table
    explained = rf"(?:^| )(?:{'|'.join(map(re.escape, gone))}): .*?\.(?= |$)"  # "MFU: what it means."
    remarks = [re.sub(explained, "", remark).strip() for remark in table.remarks]
    remarks.append(f"not shown for lack of space: {', '.join(gone)}; --json has all")
    return table._replace(header=rows[0], rows=rows[1:], remarks=remarks)


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def _line_width(widths: Sequence[int]) -> int:
    return sum(width + 2 for width in widths if width) - 2


def _row_lines(row: Sequence[str], widths: Sequence[int], text: Sequence[int], width: int | None) -> Iterator[str]:
    """A row as one line, or as more where a cell is wider than its column.

    A first cell with a word that is too long for its column has lines of its own.
    """
    cells = [wrapped(cell, column) if len(cell) > column else [cell] for cell, column in zip(row, widths, strict=True)]
    if width is not None and max(map(len, cells[0])) > widths[0]:
        yield from textwrap.wrap(row[0], width)
        cells[0] = [""]
    for parts in zip_longest(*cells, fillvalue=""):
        sized = enumerate(zip(parts, widths, strict=True))
        line = [part.ljust(size) if column in text else part.rjust(size) for column, (part, size) in sized if size]
        yield "  ".join(line).rstrip()
