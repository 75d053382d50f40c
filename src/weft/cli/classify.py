"""`weft classify`: a label for every text."""

import json
from pathlib import Path
from typing import Annotated

import typer


def classify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Texts: one a line, or a row of .jsonl, .csv, .tsv or .parquet.")
    ] = "-",
    column: Annotated[
        str | None, typer.Option(help="The column that holds the text; the one of training if not given.")
    ] = None,
    second: Annotated[
        str | None, typer.Option(help="The column of the other text, where pairs are classified.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Lines of JSON with the probability of every label.")] = False,
) -> None:
    """Tell the likeliest label of each text, with its probability. Standard input is read if no FILE is given."""
    from weft import api
    from weft.data.table import read_rows
    from weft.errors import ConfigError
    from weft.evaluate.embedding import read_texts

    loaded = api.load(run)
    goal = loaded.config.objective
    one = column or str(getattr(goal, "text", "text"))
    two = second or getattr(goal, "second", None)
    if two is None:
        suffixes = Path(file).suffixes
        plain = file == "-" or not suffixes or suffixes[0] in (".txt", ".md")
        texts, others = read_texts(file, column or ("text" if plain else one)), None
    elif file == "-":
        raise ConfigError(f"{run}: it classifies pairs of texts; name a file with the columns '{one}' and '{two}'")
    else:
        rows = list(read_rows([file], [one, two]))
        texts, others = [row.values[one] for row in rows], [row.values[two] for row in rows]
    for text, shares in zip(texts, loaded.classify(texts, others), strict=True):
        if as_json:
            typer.echo(json.dumps({"text": text, "label": next(iter(shares)), "labels": shares}, ensure_ascii=False))
        else:
            label, share = next(iter(shares.items()))
            typer.echo(f"{label}\t{share:.4f}\t{text}")
