"""`weft classify`: predictions of a run that was trained on labelled rows."""

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading


def classify(
    run: options.Run,
    file: options.Texts = "-",
    column: str | None = option(None, "The column of the text (default: as in training).", value="NAME"),
    second: str | None = option(None, "The column of the second text, or of the text with the answer.", value="NAME"),
    as_json: bool = flag("--json", "Print lines of JSON, with the probability of every label or tag."),
) -> None:
    """Predict what the run was trained for: a label or a number for each text, a tag for each word, or the answer to a
    question in a text.

    Reads standard input if no FILE is given. Words to tag are separated by spaces, or given as lists in a column.

    $ weft classify runs/reviews lines.txt --json
    """
    with loading():
        from weft.api.load import load
        from weft.runs.lines import record

    loaded = load(run)
    for prediction in loaded.objective.predictions(loaded.model, file, column, second=second):
        echo(record(prediction.record) if as_json else prediction.line)
