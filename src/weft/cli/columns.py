"""Tables as plain text in columns: quick to print, whole in a pipe, cut at the edge of a terminal."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

import typer

from weft.cli.terminal import shown


def show(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    remarks: Sequence[str] = (),
    text: Sequence[int] = (0,),
) -> None:
    """Print rows under a header, if it has any names, then remarks; on a terminal, cut or wrapped at its edge.

    Columns numbered in `text` stand to the left, all others to the right.
    """
    header, rows = [shown(each) for each in header], [[shown(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if title:
        typer.secho(shown(title), bold=True)
    for number, row in enumerate([header, *rows]):
        if not any(row):
            continue
        cells = [
            cell.ljust(width) if place in text else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        if terminal is not None and len(line) > terminal:
            line = line[: terminal - 1] + "…"
        typer.secho(line, dim=True if number == 0 else None)
    for remark in remarks:
        for line in textwrap.wrap(shown(remark), width=max(20, min(terminal or 120, 120))):
            typer.secho(line, dim=True)
