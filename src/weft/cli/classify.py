"""`weft classify`: what a run that learned from labelled rows predicts for new ones."""

from typing import Annotated

import typer

from weft.cli import options
from weft.cli.loading import loading
from weft.cli.terminal import echo


def classify(
    run: options.Run,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Texts: one a line, or a row of .jsonl, .csv, .tsv or .parquet.")
    ] = "-",
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The column that holds the text; the training column if not given."),
    ] = None,
    second: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The column of the other text, in pairs, or of the one that has the answer."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Lines of JSON, with the probability of every label or tag.")
    ] = False,
) -> None:
    """Predict a label for each text, a number, a tag for each word, or where a text answers a question: what the run
    learned to predict.

    Standard input is read if no FILE is given. Words are separated by spaces, or given as lists in a column.
    """
    with loading():
        from weft.api.load import load
        from weft.runs.lines import record

    loaded = load(run)
    for prediction in loaded.objective.predictions(loaded.model, file, column, second):
        echo(record(prediction.record) if as_json else prediction.line)
