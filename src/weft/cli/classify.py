"""`weft classify`: what a run that learned from labelled rows predicts for new ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import options

if TYPE_CHECKING:
    from weft.api.run import Run


def classify(
    run: options.Run,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Texts: one a line, or a row of .jsonl, .csv, .tsv or .parquet.")
    ] = "-",
    column: Annotated[
        str | None, typer.Option(help="The column that holds the text; the one of training if not given.")
    ] = None,
    second: Annotated[
        str | None, typer.Option(help="The column of the other text, where pairs are classified.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Lines of JSON, with the probability of every label or tag.")
    ] = False,
) -> None:
    """Predict a label for each text, a number, or a tag for each word: what the run learned to predict.

    Standard input is read if no FILE is given. Words are what spaces divide, or the lists in a column.
    """
    from weft.api.run import load

    loaded = load(run)
    predict = _tags if loaded.config.objective.kind == "tag" else _predictions
    for plain, whole in predict(loaded, file, column, second):
        typer.echo(json.dumps(whole, ensure_ascii=False) if as_json else plain)


Predictions = Iterator[tuple[str, dict[str, Any]]]  # a line, and the same for JSON


def _predictions(run: "Run", file: str, column: str | None, second: str | None) -> Predictions:
    """A label or a number for each text, or pair of texts."""
    from weft.data.table import RowSource, read_rows
    from weft.errors import ConfigError
    from weft.evaluate.embedding import read_texts

    objective = run.config.objective
    one = column or str(getattr(objective, "text", "text"))
    two = second or getattr(objective, "second", None)
    if two is None:
        texts, others = read_texts(file, column or ("text" if _has_lines(file) else one)), None
    elif file == "-":
        raise ConfigError(f"{run.path}: expects pairs of texts; name a file with the columns '{one}' and '{two}'")
    else:
        rows = list(read_rows(RowSource([file], {one: "text", two: "text"})))
        texts, others = [row.values[one] for row in rows], [row.values[two] for row in rows]
    if objective.kind == "regress":
        for text, number in zip(texts, run.rate(texts, others), strict=True):
            yield f"{number:.4f}\t{text}", {"text": text, "score": number}
        return
    for text, shares in zip(texts, run.classify(texts, others), strict=True):
        label, share = next(iter(shares.items()))
        yield f"{label}\t{share:.4f}\t{text}", {"text": text, "label": label, "labels": shares}


def _tags(run: "Run", file: str, column: str | None, second: str | None) -> Predictions:
    """A tag for each word."""
    from weft.data.table import RowSource, read_rows
    from weft.errors import ConfigError
    from weft.evaluate.embedding import read_texts

    if second is not None:
        raise ConfigError(f"--second {second}: {run.path} tags the words of one text")
    if _has_lines(file):
        sentences = [text.split() for text in read_texts(file, column or "text")]
    else:
        name = column or str(getattr(run.config.objective, "words", "words"))
        sentences = [row.values[name] for row in read_rows(RowSource([file], {name: "words"}))]
    for words, tags in zip(sentences, run.tag(sentences), strict=True):
        plain = " ".join(f"{word}/{tag}" for word, (tag, _) in zip(words, tags, strict=True))
        yield plain, {"words": words, "tags": [tag for tag, _ in tags], "probabilities": [share for _, share in tags]}


def _has_lines(file: str) -> bool:
    """Whether a file holds plain lines of text."""
    from weft.data.documents import is_plain

    return is_plain(file) or not Path(file).suffix
