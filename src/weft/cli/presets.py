"""`weft presets`: the models and the recipes that have a name."""

import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import columns
from weft.figures.tables import Table


def presets(
    as_json: Annotated[bool, typer.Option("--json", help="The models as one JSON list, for scripts.")] = False,
) -> None:
    """List the models that come with weft, with their sizes and where they come from; and the recipes.

    weft train takes the name of either.
    """
    from weft.costs.presets import rows
    from weft.costs.units import short

    if as_json:
        columns.print_json([row._asdict() for row in rows()])
        return
    header = ("preset", "kind", "params", "layers × d (heads)", "context", "FLOPs/tok", "from")
    cells = [
        (
            row.name,
            row.kind,
            short(row.parameters) if row.parameters else "counts",
            row.shape,
            f"{row.context:,}" if row.context else "",
            short(row.flops_per_token) if row.flops_per_token else "",
            row.origin,
        )
        for row in rows()
    ]
    columns.show(Table(header, cells, text=(0, 1, 6), spare=(5, 6, 4)))
    typer.echo("")
    columns.show(Table(("recipe", "what it learns", "data"), _recipes(), text=(0, 1, 2)))


def _recipes() -> list[tuple[str, str, str]]:
    """Every recipe that comes with weft: its name, what it is about, and the data it needs."""
    rows: list[tuple[str, str, str]] = []
    for file in sorted(Path(__file__).parents[1].glob("recipes/*.toml"), key=lambda file: file.stem):
        text = file.read_text(encoding="utf-8")
        head = " ".join(line.removeprefix("# ") for line in text.split("\n\n")[0].splitlines() if line[:1] == "#")
        about = re.split(r"[:;.] |(?<=\?) ", head)[0]  # up to the end of the first clause
        sources = tomllib.loads(text).get("data", {}).get("sources", [])
        builtin = all(source.startswith("builtin:") for source in sources)
        data = "--data FILE" if not sources else "built in" if builtin else ", ".join(sources)
        rows.append((file.stem, about, data))
    return rows
