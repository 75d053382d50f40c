"""`weft embed`: turn texts into vectors."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading
from weft.errors import ConfigError, DataError, suggestion

POOLINGS = ("mean", "first", "last", "max", "mean-sqrt", "weighted-mean")


def embed(
    run: options.Run,
    file: options.Texts = "-",
    pooling: str | None = option(
        None, "Pooling over tokens (default: as in training, or mean).", value="mean|first|last|max|…"
    ),
    raw: bool = flag("--raw", "Don't normalise the vectors to length 1."),
    column: str = option("text", "The column of the text, if the file has columns.", value="NAME"),
    batch: int = option(32, "Texts per batch.", min=1),
    special_tokens: options.SpecialTokens = False,
    out: Path | None = option(None, "Write to this .npy file, or .jsonl with the texts (default: print JSON)."),
) -> None:
    """Turn texts into vectors: similar texts get similar vectors. Reads standard input if no FILE is given.

    $ weft embed runs/bert lines.txt --out vectors.npy
    """
    if pooling is not None and pooling not in POOLINGS:
        raise ConfigError(f"--pooling {pooling}: {suggestion(pooling, POOLINGS)}")
    if out is not None and out.suffix not in (".npy", ".jsonl"):
        raise ConfigError(f"--out {out}: expected a name that ends in .npy or .jsonl")

    import numpy as np

    with loading():
        from weft.api.load import load
    from weft.data.table import read_texts
    from weft.runs.lines import record
    from weft.storage.files import check_writable, replacing

    if out is not None:
        check_writable(out)
    texts = read_texts(file, column)
    loaded = load(run).reading_specials() if special_tokens else load(run)
    vectors = loaded.embed(texts, pooling=pooling, normalise=not raw, batch=batch)  # type: ignore[arg-type]
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
    echo(f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} dimensions", err=True)
