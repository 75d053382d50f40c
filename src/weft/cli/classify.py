"""`weft classify`: predictions of a run that was trained on labelled rows."""

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading
from weft.errors import ConfigError


def classify(
    run: options.Run,
    file: options.Texts = "-",
    column: str | None = option(None, "The column of the text (default: as in training).", value="NAME"),
    second: str | None = option(None, "The column of the second text, or of the text with the answer.", value="NAME"),
    labels: str | None = option(None, "Labels to choose from, without training: 'sports, politics'.", value="A,B,…"),
    template: str = option("This example is {}.", "The hypothesis that a label becomes, with --labels."),
    multi_label: bool = flag("--multi-label", "Each of --labels may be right, independently of the others."),
    as_json: bool = flag("--json", "Print lines of JSON, with the probability of every label or tag."),
) -> None:
    """Predict what the run was trained for: a label or a number for each text, a tag for each word, or the answer to a
    question in a text.

    Reads standard input if no FILE is given. Words to tag are separated by spaces, or given as lists in a column.

    With --labels, a model of natural-language inference (such as bart-large-mnli) judges how well each label fits.

    $ weft classify runs/reviews lines.txt --json
    """
    with loading():
        from weft.api.load import load
        from weft.data.table import read_texts
        from weft.objectives.classify import Classify
        from weft.runs.lines import record

    loaded = load(run)
    if labels is not None:
        names = list(dict.fromkeys(name.strip() for name in labels.split(",") if name.strip()))
        if not names or second is not None:
            wrong = f"--labels {labels!r}: expected labels separated by commas"
            raise ConfigError(wrong if not names else f"--second {second}: --labels reads one text at a time")
        texts = read_texts(file, column, "text")
        shares = loaded.classify(texts, labels=names, template=template, multi_label=multi_label)
        objective = loaded.objective
        assert isinstance(objective, Classify)  # classify has checked it
        predictions = iter([objective.present(text, row) for text, row in zip(texts, shares, strict=True)])
    else:
        predictions = loaded.objective.predictions(loaded.model, file, column, second=second)
    for prediction in predictions:
        echo(record(prediction.record) if as_json else prediction.line)
