"""`weft embed`: turn texts into vectors."""

from pathlib import Path
from typing import Any

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading
from weft.errors import ConfigError, os_errors, suggestion

POOLINGS = ("mean", "first", "last", "max", "mean-sqrt", "weighted-mean")


def embed(
    run: options.Run,
    file: options.Texts = "-",
    word: str | None = option(
        None, "Vectors of this word in the texts, one per occurrence; '[]': of those in square brackets.", value="WORD"
    ),
    layer: int | None = option(None, "Vectors of this layer; 0: the embeddings (default: the last, or ELMo's mean)."),
    mix: str | None = option(
        None, "Mean of all layers, weighted by the softmax of these numbers, the embeddings' first.", value="S0,S1,…"
    ),
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
    try:
        weights = None if mix is None else [float(weight) for weight in mix.split(",")]
    except ValueError:
        raise ConfigError(f"--mix {mix}: expected numbers, such as 0,0,1") from None
    if out is not None and out.suffix not in (".npy", ".jsonl"):
        raise ConfigError(f"--out {out}: expected a name that ends in .npy or .jsonl")

    import numpy as np

    with loading():
        from weft.api.load import load
        from weft.models.hidden import find_words
    from weft.data.table import read_texts
    from weft.runs.lines import record
    from weft.storage.files import check_writable, replacing

    if out is not None:
        check_writable(out)
    loaded = load(run).reading_specials() if special_tokens else load(run)
    texts = read_texts(file, column)
    named: list[dict[str, Any]] = [{"text": text} for text in texts]
    if word is not None:
        plain, words = find_words(texts, word)
        named = [{"text": plain[at.sentence], "word": at.text, "start": at.start, "end": at.end} for at in words]
    chosen: dict[str, Any] = {"word": word, "layer": layer, "mix": weights, "pooling": pooling}
    vectors = loaded.embed(texts, **chosen, normalise=not raw, batch=batch)
    lines = (record({**each, "vector": vector}) for each, vector in zip(named, vectors.tolist(), strict=True))
    if out is None:
        for line in lines:
            echo(line)
        return
    with os_errors(out, verb="written"), replacing(out) as stream:
        if out.suffix == ".npy":
            np.save(stream, vectors, allow_pickle=False)
        else:
            stream.writelines(f"{line}\n".encode() for line in lines)
    echo(f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} dimensions", err=True)
