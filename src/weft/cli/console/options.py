"""Arguments and options that several commands share, and what a shell completes them with."""

from glob import escape
from pathlib import Path
from typing import Annotated, Any

import typer


def argument(name: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An argument of a command: what it is called in the help, and what that says of it."""
    return typer.Argument(default, metavar=name, help=help, **more)


def option(default: Any, help: str, *names: str, value: str | None = None, **more: Any) -> Any:
    """An option: its default (... where it has none), what the help says of it, and what stands there for its value."""
    return typer.Option(default, *names, metavar=value, help=help, **more)


def flag(name: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(False, name, help=help)


def complete_recipes(ctx: Any, incomplete: str) -> list[str]:
    """Presets, recipes, .toml files and runs that begin so."""
    from weft.models.presets import PRESETS
    from weft.recipe.resolve import recipe_names

    names = [*recipe_names(), *PRESETS]
    files = [str(path) for path in _paths(incomplete, ".toml")]
    return [name for name in (*names, *files) if name.startswith(incomplete)] + complete_runs(ctx, incomplete)


def complete_runs(ctx: Any, incomplete: str) -> list[str]:
    """Folders that begin so; of those in runs/ the runs."""
    if not incomplete or "runs/".startswith(incomplete):
        return [str(path.parent) for path in sorted(Path("runs").glob("*/config.toml"))]
    return [str(path) for path in _paths(incomplete) if path.is_dir()]


def _paths(incomplete: str, ending: str = "") -> list[Path]:
    above = Path("/" if incomplete.startswith("/") else "")
    return sorted(above.glob(f"{escape(incomplete.lstrip('/'))}*{ending}"))


def complete_keys(ctx: Any, incomplete: str) -> list[str]:
    """The keys of the recipe that was named, or of any, as key=; one that is left alone with its value, too, lest the
    shell ends the word behind the =."""
    from weft.config import flat, keys_of
    from weft.errors import WeftError
    from weft.recipe.config import Recipe
    from weft.recipe.resolve import resolve

    tree: dict[str, Any] = {"model": {"kind": "decoder"}}
    try:
        named = ctx.params.get("recipe") or ctx.params.get("source")
        tree = resolve(named).model_dump() if named else tree
    except WeftError:
        pass
    keys = [key for key in keys_of(Recipe, tree) if key.startswith(incomplete)]
    value = flat(tree).get(keys[0]) if len(keys) == 1 else None
    written = "VALUE" if value is None else str(value).lower() if isinstance(value, bool) else value
    return [f"{key}=" for key in keys] + [f"{key}={written}" for key in keys if len(keys) == 1]


def complete_contenders(ctx: Any, incomplete: str) -> list[str]:
    """What can be compared, and the keys of its settings."""
    return complete_recipes(ctx, incomplete) or complete_keys(ctx, incomplete)


def recipe_argument(name: str, help: str, default: Any = ..., **more: Any) -> Any:
    """An argument that may name a preset, a recipe or a run."""
    return argument(name, help, default, **{"autocompletion": complete_recipes, **more})


Run = Annotated[Path, argument("RUN", "A run's folder.", autocompletion=complete_runs)]
AsJson = Annotated[bool, option(..., "Print JSON.", "--json")]
SpecialTokens = Annotated[
    bool, option(..., "Recognise special tokens, such as <mask>; otherwise they are plain text.", "--special-tokens")
]
Changes = Annotated[
    list[str] | None, argument("KEY=VALUE", "Settings to change, such as model.layers=8.", autocompletion=complete_keys)
]
Texts = Annotated[
    str, argument("FILE", "Texts: one per line, or one per row of a .jsonl, .csv, .tsv or .parquet file.")
]
Targets = Annotated[
    list[str] | None, option(..., "Text files whose lines are the targets of the lines of --data.", value="FILE")
]
Text = Annotated[
    list[str] | None, option(..., "The text: files, folders, builtin:python.", "--data", "-d", value="SOURCE")
]
Jobs = Annotated[
    str | None,
    option(
        ...,
        "How many runs at a time (default: as many as fit), or what runs them: slurm, ray, slurm:8.",
        value="N|slurm|ray",
    ),
]
Out = Annotated[Path | None, option(..., "Where everything is written (default: one in comparisons/).", value="FOLDER")]
