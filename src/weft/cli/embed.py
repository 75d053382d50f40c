"""`weft embed`: a vector for every text."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.loading import loading
from weft.cli.terminal import echo


def embed(
    run: options.Run,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Texts: one a line, or a row of .jsonl, .csv, .tsv or .parquet.")
    ] = "-",
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="mean, first or last: which tokens' vectors make a text's. The run's own way if not given.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Don't scale the vectors to length 1.")] = False,
    column: Annotated[
        str, typer.Option(metavar="NAME", help="The column that holds the text, where there are columns.")
    ] = "text",
    batch: Annotated[int, typer.Option(min=1, help="Texts read at a time.")] = 32,
    out: Annotated[
        Path | None, typer.Option(help="vectors.npy, or .jsonl with each text. Lines of JSON on stdout if not given.")
    ] = None,
) -> None:
    """Turn texts into vectors, similar ones for similar texts. Standard input is read if no FILE is given."""
    from weft.errors import ConfigError, DataError, suggestion

    ways = ("mean", "first", "last")
    if pooling is not None and pooling not in ways:
        raise ConfigError(f"--pooling {pooling}: {suggestion(pooling, ways)}")
    if out is not None and out.suffix not in (".npy", ".jsonl"):
        raise ConfigError(f"--out {out}: vectors are written as .npy or .jsonl")

    import numpy as np

    with loading():
        from weft.api.load import load
    from weft.data.table import read_texts
    from weft.files import check_place, replacing
    from weft.runs.lines import record

    if out is not None:
        check_place(out)
    texts = read_texts(file, column)
    vectors = load(run).embed(texts, pooling=pooling, normalise=not raw, batch=batch)  # type: ignore[arg-type]
    pairs = zip(texts, vectors.tolist(), strict=True)
    lines = (record({"text": text, "vector": vector}) for text, vector in pairs)
    if out is None:
        for line in lines:
            echo(line)
        return
    try:
        with replacing(out) as stream:
            if out.suffix == ".npy":
                np.save(stream, vectors, allow_pickle=False)
            else:
                stream.writelines(f"{line}\n".encode() for line in lines)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from None
    echo(f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers", err=True)
