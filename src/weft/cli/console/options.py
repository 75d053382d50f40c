"""Arguments and options that several commands share, and what a shell completes them with."""

from pathlib import Path
from typing import Annotated, Any

import typer


def complete_recipes(ctx: Any, incomplete: str) -> list[str]:
    """Presets, recipes, .toml files and runs that begin so."""
    from weft.models.presets import PRESETS
    from weft.recipe.resolve import recipe_names

    names = [*recipe_names(), *PRESETS]
    files = [str(path) for path in Path().glob(f"{_plain(incomplete)}*.toml")]
    return [name for name in (*names, *files) if name.startswith(incomplete)] + complete_runs(ctx, incomplete)


def complete_runs(ctx: Any, incomplete: str) -> list[str]:
    """Folders that begin so; of those in runs/ the runs."""
    if not incomplete or "runs/".startswith(incomplete):
        return [str(path.parent) for path in sorted(Path("runs").glob("*/config.toml"))]
    return [str(path) for path in sorted(Path().glob(f"{_plain(incomplete)}*")) if path.is_dir()]


def complete_keys(ctx: Any, incomplete: str) -> list[str]:
    """The keys of the recipe that was named, or of any, as key=."""
    from weft.config import keys_of
    from weft.errors import WeftError
    from weft.recipe.config import Recipe
    from weft.recipe.resolve import resolve

    tree: dict[str, Any] = {"model": {"kind": "decoder"}}
    try:
        named = ctx.params.get("recipe") or ctx.params.get("source")
        tree = resolve(named).model_dump() if named else tree
    except WeftError:
        pass
    return [f"{key}=" for key in keys_of(Recipe, tree) if key.startswith(incomplete)]


def _plain(incomplete: str) -> str:
    """What a person typed of a path, without the signs that a pattern gives a meaning."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in incomplete.lstrip("/"))


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=complete_runs)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SpecialTokens = Annotated[
    bool,
    typer.Option("--special-tokens", help="Recognise special tokens, such as <mask>; otherwise they are plain text."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings to change, such as model.layers=8.", autocompletion=complete_keys
    ),
]
Texts = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Texts: one per line, or one per row of a .jsonl, .csv, .tsv or .parquet file."
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="Text files whose lines are the targets of the lines of --data."),
]
Text = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", metavar="SOURCE", help="The text: files, folders, builtin:python."),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        metavar="N|slurm|ray",
        help="How many runs at a time (default: as many as fit), or what runs them: slurm, ray, slurm:8.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where everything is written (default: one in comparisons/)."),
]
