"""`weft config`: see a recipe with everything in it, or what a recipe may hold."""

from typing import Annotated

import typer

from weft.cli import options

app = typer.Typer(help="Show a recipe in full, or the schema of recipes.", no_args_is_help=True)


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="PRESET|RECIPE", help="A preset, a recipe's name, or a .toml file.")],
    changes: options.Changes = None,
) -> None:
    """Print the resolved recipe as TOML. What it leaves out is chosen when the text is known."""
    from weft.config import to_toml
    from weft.recipe.resolve import resolve

    typer.echo(to_toml(resolve(recipe, changes or [])), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors that complete TOML."""
    import json

    from weft.config import json_schema
    from weft.recipe.config import Recipe

    typer.echo(json.dumps(json_schema(Recipe), indent=2))
