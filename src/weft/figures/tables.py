"""Tables, defined once and formatted here as plain text; `figures/page.py` formats them for a page."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

WIDTH = 80
MIN_TEXT_WIDTH = 16  # characters that a text column keeps in a narrow terminal
WRAPPED_WIDTH = 36  # a wider column can be wrapped, so no other column has to be dropped for it


class Table(NamedTuple):
    """Columns listed in `text` are aligned left, all others right; empty columns are left out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    remarks: Sequence[str] = ()
    text: Sequence[int] = (0,)
    spare: Sequence[int] = ()  # columns that a narrow terminal drops, the first one first


def text_lines(table: Table, width: int | None = None, prose: int = WIDTH) -> Iterator[tuple[str, str]]:
    """Yield each line of a table, wrapped at `width` and `prose` columns, and its part: title, header, row, remark."""
    table = table if width is None else _drop_spare(table, width)
    widths = _widths(table)
    if width is not None and (excess := _line_width(widths) - width) > 0:
        widest = max(table.text, key=lambda column: widths[column])  # is wrapped between words
        widths[widest] = max(MIN_TEXT_WIDTH, widths[widest] - excess)
    yield from (("title", line) for line in wrap(table.title, prose))
    for number, row in enumerate((table.header, *table.rows)):
        if any(row):
            lines = _row_lines(row, widths, table.text, width=width)
            yield from (("row" if number else "header", line) for line in lines)
    yield from (("remark", line) for remark in table.remarks for line in wrap(remark, prose))


def text_table(table: Table, width: int | None = None) -> str:
    """Format a table as plain text."""
    return "\n".join(line for _, line in text_lines(table, width))


def text_tables(tables: Sequence[Table], width: int | None = None) -> str:
    """Format several tables, separated by empty lines."""
    return "\n\n".join(text_table(table, width) for table in tables)


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Wrap a paragraph without breaking words."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _drop_spare(table: Table, width: int) -> Table:
    """Empty as many spare columns as needed to fit, and add a remark that names them."""
    rows, dropped = [list(row) for row in (table.header, *table.rows)], []
    for column in table.spare:
        if _line_width([min(size, WRAPPED_WIDTH) for size in _widths(Table(rows[0], rows[1:]))]) <= width:
            break
        dropped.append(table.header[column])
        for row in rows:
            row[column] = ""
    if not dropped:
        return table
    explanation = rf"(?:^| )(?:{'|'.join(map(re.escape, dropped))}): .*?\.(?= |$)"  # "MFU: what it means."
    remarks = [re.sub(explanation, "", remark).strip() for remark in table.remarks]
    remarks.append(f"not shown for lack of space: {', '.join(dropped)}; --json has all")
    return table._replace(header=rows[0], rows=rows[1:], remarks=remarks)


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def _line_width(widths: Sequence[int]) -> int:
    return sum(width + 2 for width in widths if width) - 2


def _row_lines(row: Sequence[str], widths: Sequence[int], text: Sequence[int], *, width: int | None) -> Iterator[str]:
    """Yield a row as one line, or several if a cell is wider than its column.

    A first cell with a word that is too long for its column is on separate lines.
    """
    cells = [wrap(cell, column) if len(cell) > column else [cell] for cell, column in zip(row, widths, strict=True)]
    if width is not None and max(map(len, cells[0])) > widths[0]:
        yield from textwrap.wrap(row[0], width)
        cells[0] = [""]
    for parts in zip_longest(*cells, fillvalue=""):
        sized = enumerate(zip(parts, widths, strict=True))
        line = [part.ljust(size) if column in text else part.rjust(size) for column, (part, size) in sized if size]
        yield "  ".join(line).rstrip()
