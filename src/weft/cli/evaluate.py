"""`weft evaluate`: the metrics of a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import columns, options
from weft.cli.console.loading import loading
from weft.cli.console.terminal import echo
from weft.cli.console.together import load_together, refuse_together, together


@together
def evaluate(
    context: typer.Context,
    run: options.Run,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", metavar="SOURCE...", help="Text to evaluate on instead of the held-out part."),
    ] = None,
    targets: options.Targets = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Use overlapping windows: each starts this many tokens after the last and scores only what is new. A "
            "smaller stride is slower and gives tokens more context. A recurrent model that carries its state needs "
            "none.",
        ),
    ] = None,
    encoding: Annotated[
        str, typer.Option(metavar="NAME", help="The encoding of the files of --data, such as cp1252.")
    ] = "utf-8",
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a classifier's confusion matrix: .svg, .png or .pdf.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="BITS", help="Also measure the model with smaller weights: bf16, int8, int4 or auto."),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Also show the loss by context and token frequency, and the most surprising passages."
        ),
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="Also look for the text in the training text, by 13-grams of words. Short texts always are.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the details to this page, .html.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Evaluate on these tasks of lm-evaluation-harness instead."),
    ] = None,
    tasks_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder of your own tasks (.yaml) for --tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Use only the first N examples of each task.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a run on its held-out data, or on other data: loss, perplexity, bits per byte, accuracy, BLEU …

    A language model reads text in windows of the length it was trained with, and each token is scored once. Windows
    cross the borders of documents, unless it was trained with data.document_mask: then no document sees another, and
    the bytes of its first token, which nothing predicts, count 8 bits each. Intervals come from a bootstrap over
    documents, and over equal pieces of a long one.
    """
    if tasks is not None or tasks_path is not None or limit is not None:
        from weft.cli.console.tasks import Asked, evaluate_on_tasks
        from weft.parallel.ranks import join

        refuse_together(join(), {"--tasks": tasks})  # its harness would ask, and print, in each of them
        others = {"--data": data, "--targets": targets, "--stride": stride, "--figure": figure, "--quantize": quantize}
        others |= {"--details": details or None, "--overlap": overlap or None, "--out": out}
        evaluate_on_tasks(run, Asked(tasks, tasks_path, limit, as_json), {**others, "": context.args})
        return
    with loading():
        import torch

        from weft.api.auto import check_width
        from weft.api.evaluation_report import Wanted, evaluation_report
        from weft.parallel.ranks import join
    from weft.errors import ConfigError
    from weft.runs.lines import record

    more = context.args  # `--data *.txt` arrives as --data a.txt b.txt …
    if quantize is not None:
        check_width(quantize)
    if figure is not None or out is not None:
        from weft.figures.picture import FIGURES, PAGE, check_picture

        for path, suffixes in ((figure, FIGURES), (out, (PAGE,))):
            if path is not None:
                check_picture(path, suffixes)
    if more and not data:
        raise ConfigError(f"'{more[0]}': text is given with --data")
    if encoding != "utf-8" and not data:
        raise ConfigError(f"--encoding {encoding}: it is that of the files of --data, which isn't given")
    if targets and not data:
        raise ConfigError(f"--targets {targets[0]}: they answer the lines of --data, which isn't given")
    sources = [*(data or []), *more] or None
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
        return
    for number, table in enumerate(found.tables(details)):
        if number:
            echo()
        columns.show(table)
