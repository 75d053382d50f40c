"""Tables as plain text in columns: quick to print, whole in a pipe, cut at the edge of a terminal."""

import shutil
import sys
from collections.abc import Sequence

import typer


def show(header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,), title: str = "") -> None:
    """Print rows under a header. Columns numbered in `text` stand to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if title:
        typer.secho(title, bold=True)
    for number, row in enumerate([header, *rows]):
        cells = [
            cell.ljust(width) if place in text else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(cells).rstrip()
        if edge is not None and len(line) > edge:
            line = line[: edge - 1] + "…"
        typer.secho(line, dim=True) if number == 0 else typer.echo(line)


def remark(text: str) -> None:
    """A sentence about the table above, folded to the terminal."""
    import textwrap

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    for line in textwrap.wrap(text, width=max(20, min(width, 120))):
        typer.secho(line, dim=True)
