"""`weft evaluate`: how well a trained model predicts a text."""

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="SOURCE", hidden=True)] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE...", help="Other text than the run's own held-out part."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Overlapping windows: each starts so many tokens after the one before.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure loss, perplexity and bits per byte on the held-out part of the run's text, or on other text."""
    from weft import api
    from weft.errors import ConfigError

    if more and not data:
        raise ConfigError(f"'{more[0]}': text is given with --data")
    loaded = api.load(run)
    score = loaded.score([*(data or []), *(more or [])] or None, stride=stride)
    figures = {**score.numbers(), "tokens": score.tokens, "bytes": score.bytes}
    if as_json:
        typer.echo(json.dumps(figures))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("loss", f"{score.loss:.4f}", "nats a token")
    table.add_row("perplexity", f"{score.perplexity:.2f}", "of the next token")
    table.add_row("bits per byte", f"{score.bits_per_byte:.4f}", "of UTF-8 text")
    table.add_row("tokens", f"{score.tokens:,}", f"each scored once; {score.bytes:,} bytes")
    Console().print(table)
