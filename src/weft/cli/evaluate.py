"""`weft evaluate`: the metrics of a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import options
from weft.cli.console.options import flag, option
from weft.cli.console.terminal import echo, loading, print_tables
from weft.cli.console.together import load_together, refuse_together, together
from weft.errors import ConfigError


@together
def evaluate(
    context: typer.Context,
    run: options.Run,
    data: Annotated[
        list[str] | None, option("SOURCE...", "Text to evaluate on instead of the held-out part.", "--data", "-d")
    ] = None,
    targets: options.Targets = None,
    stride: Annotated[
        int | None,
        option(
            "TOKENS",
            "Use overlapping windows: each starts this many tokens after the last and scores only what is new. A "
            "smaller stride is slower and gives tokens more context. A recurrent model that carries its state needs "
            "none.",
        ),
    ] = None,
    encoding: Annotated[str, option("NAME", "The encoding of the files of --data, such as cp1252.")] = "utf-8",
    figure: Annotated[Path | None, option("FILE", "Draw a classifier's confusion matrix: .svg, .png or .pdf.")] = None,
    quantize: Annotated[
        str | None, option("BITS", "Also measure the model with smaller weights: bf16, int8, int4 or auto.")
    ] = None,
    details: Annotated[
        bool, flag("--details", "Also show the loss by context and token frequency, and the most surprising passages.")
    ] = False,
    overlap: Annotated[
        bool,
        flag("--overlap", "Also look for the text in the training text, by 13-grams of words. Short texts always are."),
    ] = False,
    out: Annotated[Path | None, option("FILE", "Write the details to this page, .html.")] = None,
    tasks: Annotated[
        str | None, option("NAME,...", "Evaluate on these tasks of lm-evaluation-harness instead.")
    ] = None,
    tasks_path: Annotated[Path | None, option("DIR", "A folder of your own tasks (.yaml) for --tasks.")] = None,
    limit: Annotated[int | None, option("N", "Use only the first N examples of each task.", min=1)] = None,
    as_json: Annotated[bool, flag("--json", "Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …

    A language model reads text in windows of the length it was trained with, and each token is scored once. Windows
    cross the borders of documents, unless it was trained with data.document_mask: then no document sees another, and
    the bytes of its first token, which nothing predicts, count 8 bits each. Intervals come from a bootstrap over
    documents, and over equal pieces of a long one.
    """
    sources = [*(data or []), *context.args] or None  # `--data *.txt` arrives as --data a.txt b.txt …
    if tasks is not None or tasks_path is not None or limit is not None:
        from weft.cli.console.tasks import evaluate_on_tasks
        from weft.parallel.ranks import join

        refuse_together(join(), {"--tasks": tasks})  # its harness would ask, and print, in each of them
        evaluate_on_tasks({**context.params, "data": sources})
        return
    with loading():
        import torch

        from weft.api.evaluation_report import Wanted, evaluation_report
        from weft.api.load import check_width
        from weft.parallel.ranks import join
    from weft.figures.picture import FIGURES, PAGE, check_picture
    from weft.runs.lines import record

    if quantize is not None:
        check_width(quantize)
    if figure is not None:
        check_picture(figure, FIGURES)
    if out is not None:
        check_picture(out, (PAGE,))
    if sources and not data:
        raise ConfigError(f"'{sources[0]}': text is given with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: it is that of the files of --data, which isn't given")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    refuse_together(join(), {"--quantize": quantize, "--figure": figure, "--out": out})
    refuse_together(join(), {"--data": "-" in (sources or ()) and "-"})  # there is one standard input
    loaded = load_together(run, dtype=torch.float32)  # as it learned, whatever it would write with
    wanted = Wanted(sources, targets or (), stride, encoding, figure, quantize, details, overlap, out)
    found = evaluation_report(loaded, wanted)
    if figure is not None:
        from weft.figures.heatmap import ConfusionMatrix

        ConfusionMatrix(tuple(map(tuple, found.metrics["matrix"])), tuple(found.metrics["labels"])).save(figure)
    if out is not None:
        from weft.evaluate.page import EvaluationPage

        assert found.details is not None
        page = EvaluationPage(f"Evaluation of {loaded.path.name}", found.metrics_table(), found.details, found.overlap)
        echo(f"wrote {page.save(out)}", err=as_json)
    if as_json:
        echo(record(found.record()))
    else:
        print_tables(*found.tables(details))
