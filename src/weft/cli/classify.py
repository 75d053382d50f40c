"""`weft classify`: what a run that learned from labelled rows predicts for new ones."""

from typing import Annotated

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading


def classify(
    run: options.Run,
    file: options.Texts = "-",
    column: Annotated[
        str | None, option("NAME", "The column that holds the text (default: the one used in training).")
    ] = None,
    second: Annotated[
        str | None, option("NAME", "The column of a pair's second text, or of the text that holds the answer.")
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print lines of JSON, with the probability of every label or tag.")
    ] = False,
) -> None:
    """Predict what the run learned to predict: a label or a number for each text, a tag for each word, or where a text
    answers a question.

    Reads standard input if no FILE is given. Words are separated by spaces, or given as lists in a column.
    """
    with loading():
        from weft.api.load import load
        from weft.runs.lines import record

    loaded = load(run)
    for prediction in loaded.objective.predictions(loaded.model, file, column, second):
        echo(record(prediction.record) if as_json else prediction.line)
