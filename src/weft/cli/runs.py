"""`weft runs`: list the runs in a folder, or compare the settings of two."""

import json
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import options
from weft.cli.console.options import argument
from weft.cli.console.terminal import print_json, print_tables
from weft.errors import ConfigError
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.runs.listing import RunRow

ABOUT_WORDS = "A folder of runs (default: runs); or diff A B, to compare two runs, recipes or presets."
MAX_NAMED = 2  # names of data per run in the table
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def runs(
    words: list[str] | None = argument("DIR", ABOUT_WORDS, None, autocompletion=options.complete_runs),
    as_json: options.AsJson = False,
) -> None:
    """List the runs in a folder with their objective, progress and best metric; or compare two recipes.

    weft runs diff A B shows the settings in which two runs, recipes or presets differ.

    $ weft runs diff gpt2 llama-7b
    """
    words = words or ["runs"]
    if words[0] == "diff":
        if len(words) != 3:
            raise ConfigError("diff: expected two runs, recipes or presets, as in: weft runs diff gpt2 llama-7b")
        _diff(words[1], words[2], as_json)
        return
    if len(words) > 1:
        raise ConfigError(f"'{words[1]}': expected one folder; to compare two runs: weft runs diff A B")
    from weft.runs.listing import list_runs

    rows = list_runs(Path(words[0]))
    if as_json:
        print_json([asdict(row) for row in rows])
    elif rows:
        header = ("run", "objective", "text", "model", "steps", "best", "size", "age", "state")
        problems = [f"{row.name}: {row.problem}" for row in rows if row.problem]
        print_tables(Table(header, list(map(_cells, rows)), "", problems, (0, 1, 2, 3, 5, 8), spare=(6, 7, 1, 3)))
    else:
        typer.echo(f"no runs in {words[0]}")


def _cells(row: "RunRow") -> tuple[str, ...]:
    from weft.costs.units import byte_size, short
    from weft.recipe.metrics import metric

    names = list(dict.fromkeys("/".join(Path(name).parts[-2 if "*" in name else -1 :]) for name in row.data))
    planned = f"/{row.steps:,}" if row.steps is not None else ""
    parameters = f" {short(row.parameters)}" if row.parameters else ""
    best = "" if row.best is None or row.metric is None else metric(row.metric).text(row.best)
    age = time() - row.changed
    seconds, unit = next((each for each in UNITS if age >= each[0]), UNITS[-1])  # the largest unit that fits
    return (
        row.name,
        row.objective or "",
        ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""),
        f"{row.model}{parameters}" if row.model else "",
        "" if row.steps_done is None else f"{row.steps_done:,}{planned}",
        f"{metric(row.metric or '').title} {best}" if best else "",
        byte_size(row.bytes),
        f"{max(0, int(age // seconds))} {unit}",
        row.state,
    )


def _diff(one: str, other: str, as_json: bool) -> None:
    from weft.runs.listing import differences, recipe_of

    changed = differences(recipe_of(one), recipe_of(other))
    if as_json:
        print_json([{"key": key, "first": first, "second": second} for key, first, second in changed])
    elif changed:
        rows = [(key, _shown(first), _shown(second)) for key, first, second in changed]
        print_tables(Table(("key", one, other), rows, text=(0, 1, 2)))
    else:
        typer.echo(f"{one} and {other} have the same settings")


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
