"""`weft config`: a resolved recipe, the schema of recipes, and a Slurm script."""

import json
from importlib import resources

import typer

from weft.cli.console import options
from weft.cli.console.help import Command, CommandGroup
from weft.cli.console.options import recipe_argument
from weft.cli.console.terminal import print_json

app = typer.Typer(
    help="Show a resolved recipe, the schema of recipes, or a Slurm script.", no_args_is_help=True, cls=CommandGroup
)


@app.command(cls=Command)
def show(
    recipe: str = recipe_argument("PRESET|RECIPE", "A preset, a recipe's name, or a .toml file."),
    changes: options.Changes = None,
    as_json: options.AsJson = False,
) -> None:
    """Print a resolved recipe as TOML. Comments mark the settings that training chooses for the text and the machine.

    $ weft config show gpt-tiny model.layers=6 > recipe.toml
    """
    from weft.config import to_toml
    from weft.recipe.resolve import resolve
    from weft.recipe.settle import open_keys

    resolved = resolve(recipe, changes or [])
    if as_json:
        print_json(resolved.model_dump(mode="json"))
        return
    comments = dict.fromkeys(open_keys(resolved), "chosen from the text")
    comments.update((key, "chosen for the machine") for key in ("optimizer", "precision", "compile") if key in comments)
    typer.echo(to_toml(resolved, comments), nl=False)


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON Schema of recipes, for editors that complete TOML.

    $ weft config schema > recipe.schema.json
    """
    from weft.recipe.config import Recipe

    schema = {**Recipe.model_json_schema(), "$schema": "https://json-schema.org/draft/2020-12/schema"}
    typer.echo(json.dumps(schema, indent=2))


@app.command(cls=Command)
def slurm() -> None:
    """Print a Slurm batch script that trains on several machines and resumes after pre-emption.

    $ weft config slurm > train.sbatch

    $ sbatch --nodes=2 --gpus-per-node=8 train.sbatch runs/large gpt2 --data tokens parallel.shard=16
    """
    script = resources.files("weft") / "recipes" / "slurm" / "train.sbatch"
    typer.echo(script.read_text(encoding="utf-8"), nl=False)
