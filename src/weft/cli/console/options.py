"""Arguments and options that several commands share, and their shell completion."""

import shlex
from glob import escape
from pathlib import Path
from typing import Annotated, Any

import typer


def argument(name: str, help: str, default: Any = ..., **settings: Any) -> Any:
    """Declare an argument of a command by its name in the help; `settings` are typer's."""
    return typer.Argument(default, metavar=name, help=help, **settings)


def option(default: Any, help: str, *names: str, value: str | None = None, **settings: Any) -> Any:
    """Declare an option: its default (... for none), its help, and the name of its value there."""
    return typer.Option(default, *names, metavar=value, help=help, **settings)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(False, name, help=help)


def command_line(context: typer.Context) -> str:
    """Return the command as a line for a shell."""
    return shlex.join(["weft", *context.obj])


def complete_recipes(ctx: Any, incomplete: str) -> list[str]:
    """Complete presets, recipes, .toml files and runs."""
    from weft.models.presets import PRESETS
    from weft.recipe.resolve import recipe_names

    names = [*recipe_names(), *PRESETS]
    files = [str(path) for path in _paths(incomplete, ".toml")]
    return [name for name in (*names, *files) if name.startswith(incomplete)] + complete_runs(ctx, incomplete)


def complete_runs(ctx: Any, incomplete: str) -> list[str]:
    """Complete folders; inside runs/ only runs."""
    if not incomplete or "runs/".startswith(incomplete):
        return [str(path.parent) for path in sorted(Path("runs").glob("*/config.toml"))]
    return [str(path) for path in _paths(incomplete) if path.is_dir()]


def _paths(incomplete: str, suffix: str = "") -> list[Path]:
    root = Path("/" if incomplete.startswith("/") else "")
    return sorted(root.glob(f"{escape(incomplete.lstrip('/'))}*{suffix}"))


def complete_keys(ctx: Any, incomplete: str) -> list[str]:
    """Complete the keys of the named recipe, or of any recipe, as `key=`.

    A single match comes with its value as well: otherwise the shell would end the word after the `=`.
    """
    from weft.config import flat, keys_of
    from weft.errors import WeftError
    from weft.recipe.config import Recipe
    from weft.recipe.resolve import resolve

    tree: dict[str, Any] = {"model": {"kind": "decoder"}}
    try:
        recipe = ctx.params.get("recipe") or ctx.params.get("source")
        tree = resolve(recipe).model_dump() if recipe else tree
    except WeftError:
        pass
    keys = [key for key in keys_of(Recipe, tree) if key.startswith(incomplete)]
    value = flat(tree).get(keys[0]) if len(keys) == 1 else None
    shown = "VALUE" if value is None else str(value).lower() if isinstance(value, bool) else value
    return [f"{key}=" for key in keys] + [f"{key}={shown}" for key in keys if len(keys) == 1]


def complete_contenders(ctx: Any, incomplete: str) -> list[str]:
    """Complete what can be compared, and the keys of its settings."""
    return complete_recipes(ctx, incomplete) or complete_keys(ctx, incomplete)


def recipe_argument(name: str, help: str, default: Any = ..., **settings: Any) -> Any:
    """Declare an argument that names a preset, a recipe or a run."""
    return argument(name, help, default, **{"autocompletion": complete_recipes, **settings})


def run_option(help: str, panel: str | None = None) -> Any:
    """Declare an option that names a run, in a panel of the help."""
    return option(None, help, value="RUN", autocompletion=complete_runs, rich_help_panel=panel)


Run = Annotated[Path, argument("RUN", "A run's folder.", autocompletion=complete_runs)]
AsJson = Annotated[bool, option(..., "Print JSON.", "--json")]
Quantize = Annotated[str | None, option(..., "Quantise the weights: bf16, int8, int4 or auto.", value="BITS")]
SpecialTokens = Annotated[
    bool,
    option(..., "Recognise special tokens, such as <mask>; by default they are ordinary text.", "--special-tokens"),
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
        "Number of runs at the same time (default: as many as fit), or the scheduler of the runs: slurm, ray, slurm:8.",
        value="N|slurm|ray",
    ),
]
Out = Annotated[
    Path | None, option(..., "The folder to write everything to (default: one in comparisons/).", value="FOLDER")
]
