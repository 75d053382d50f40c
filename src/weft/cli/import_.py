"""`weft import`: another program's model as a run."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A Hugging Face folder or hub name, a .gguf file, a CTranslate2 folder, "
            "llama2.c's .bin or nanoGPT's .pt.",
        ),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The new run's folder.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The tokenizer, for a source that comes without one.")
    ] = None,
) -> None:
    """Make a run of a model that was trained elsewhere. Nothing in its files is run."""
    from weft.api import exchange

    folder, loaded = exchange.import_model(source, run, tokenizer=tokenizer)
    model = loaded.model
    assert loaded.tokenizer is not None
    typer.echo(f"{folder.path}: from {loaded.origin}")
    typer.echo(f"{exchange.parameters(model):,} parameters, {loaded.tokenizer.vocab_size:,} tokens, {model.kind}")
