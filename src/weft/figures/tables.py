"""Tables as a page and a terminal show them."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from weft.figures.page import template

WIDTH = 80


class Table(NamedTuple):
    """Something to print: columns numbered in `text` stand to the left, all others to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str
    remarks: Sequence[str] = ()
    text: Sequence[int] = (0,)


def text_table(table: Table) -> str:
    """A table in plain text; its remarks are wrapped at 80 columns."""
    rows = [[str(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [table.title, *("  ".join(_cells(row, widths, table.text)).rstrip() for row in rows)]
    for remark in table.remarks:
        lines += textwrap.wrap(remark, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line for line in lines if line)


def text_tables(tables: Sequence[Table]) -> str:
    """Several, one below another."""
    return "\n\n".join(map(text_table, tables))


def html_table(table: Table) -> Markup:
    """A table as part of a page; a wide one scrolls by itself."""
    return Markup(template("costs.html").module.table(table))  # type: ignore[attr-defined]


def html_tables(tables: Sequence[Table]) -> Markup:
    """Several, one below another."""
    return Markup("").join(map(html_table, tables))


def _cells(row: Sequence[str], widths: Sequence[int], text: Sequence[int]) -> list[str]:
    sized = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if column in text else cell.rjust(width) for column, (cell, width) in sized if width]
