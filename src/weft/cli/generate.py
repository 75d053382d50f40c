"""`weft generate`: let a trained model write."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; '-' reads it from stdin.")] = "",
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Below 1 safer, above 1 bolder (default: 1).", show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest tokens that hold this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this part of the best.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
) -> None:
    """Continue a text with a trained model. The prompt and what follows go to stdout, as it is written."""
    from weft.api import load, sampling
    from weft.errors import ConfigError

    if greedy and temperature is not None:
        raise ConfigError("--greedy and --temperature exclude each other: greedy decoding draws nothing")
    settings = sampling(
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(run)
    stream = loaded.write(text, settings)
    sys.stdout.write(text)
    for piece in stream:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
