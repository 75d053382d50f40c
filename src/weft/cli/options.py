"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Changes = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as model.layers=8.")]
