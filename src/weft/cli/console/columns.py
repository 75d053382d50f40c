"""Tables and JSON on standard output: whole in a pipe, and fitted to the width of a terminal."""

import json
from typing import Any

import typer

from weft.cli.console.terminal import shown, terminal_width
from weft.figures.tables import Table, text_lines

MIN_PROSE_WIDTH, MAX_PROSE_WIDTH = 20, 120  # columns that titles and remarks are wrapped at
STYLES: dict[str, dict[str, Any]] = {
    "title": {"bold": True},
    "header": {"dim": True},
    "row": {},
    "remark": {"dim": True},
}


def show(table: Table) -> None:
    """Print a table."""
    width = terminal_width()
    safe = table._replace(
        header=list(map(shown, table.header)),
        rows=[list(map(shown, row)) for row in table.rows],
        title=shown(table.title),
        remarks=list(map(shown, table.remarks)),
    )
    for part, line in text_lines(safe, width, max(MIN_PROSE_WIDTH, min(width or MAX_PROSE_WIDTH, MAX_PROSE_WIDTH))):
        typer.secho(line, **STYLES[part])


def print_json(value: Any) -> None:
    """Print one JSON document."""
    from weft.runs.lines import finite

    typer.echo(json.dumps(finite(value), ensure_ascii=False, indent=2, allow_nan=False))
