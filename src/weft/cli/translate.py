"""`weft translate`: a line from every line."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import options
from weft.cli.console.terminal import loading, write
from weft.cli.console.together import load_together, together
from weft.errors import ConfigError, DataError
from weft.files import check_place, write_text


@together
def translate(
    run: options.Run,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Lines of text; standard input if not given.")] = "-",
    beam: Annotated[
        int | None, typer.Option(min=1, help="The width of beam search; 1 is greedy (default: the checkpoint's, or 5).")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide scores by length to this power; higher favours long answers (default: the checkpoint's, or 1)."
        ),
    ] = None,
    coverage_penalty: Annotated[
        float | None,
        typer.Option(min=0.0, help="Lower the score of answers that leave out parts of the line (default: 0)."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            help="End the search once this many times the beam's width of answers are complete "
            "(default: the checkpoint's, or 1)."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="The longest answer, in tokens (default: twice the line's and 50, up to the run's length)."
        ),
    ] = None,
    reads: Annotated[
        str | None, typer.Option("--from", metavar="CODE", help="The lines' language, for a multilingual model: en_XX.")
    ] = None,
    writes: Annotated[
        str | None, typer.Option("--to", metavar="CODE", help="The language to write, for a multilingual model.")
    ] = None,
    special_tokens: options.SpecialTokens = False,
    out: Annotated[Path | None, typer.Option(help="The file to write to (default: standard output).")] = None,
) -> None:
    """Translate a file line by line, or whatever the run learned to write from a text. Blank lines stay blank."""
    with loading():
        from weft.api.settings import beam as beam_settings
        from weft.api.settings import with_defaults
        from weft.decode.translate import RATIO
        from weft.objectives.frame import Asked
        from weft.parallel.ranks import join
    from weft.data.streams import lines
    from weft.progress import bar

    scoring = {"length-penalty": length_penalty, "coverage-penalty": coverage_penalty, "patience": patience}

    def check(beams: int | None) -> None:
        for name, value in scoring.items():
            if beams == 1 and value is not None:
                raise ConfigError(f"--{name} {value}: a beam of 1 has no scores to compare; leave it out")

    check(beam)
    if out is not None:
        check_place(out)
    read = join().share(lambda: [line.rstrip("\r\n") for line in lines(file)])  # as in training
    loaded = load_together(run)
    loaded = loaded.reading_specials() if special_tokens else loaded
    power = None if length_penalty is None else {"kind": "power", "alpha": length_penalty}
    scored = {"length_penalty": power, "coverage_penalty": coverage_penalty, "patience": patience}
    given = {"beams": beam, "max_tokens": max_tokens, **scored}
    usual = {"beams": 5, "patience": 1.0, "max_tokens": loaded.config.batch.length, **loaded.beam_defaults}
    settings = beam_settings(**with_defaults(given, usual))
    check(settings.beams)
    ratio = RATIO if max_tokens is None else None
    with bar("translating", len(read)) as advance:
        written = loaded.translate(read, settings, Asked(reads, writes), progress=advance, ratio=ratio)
    text = "".join(line.replace("\n", " ") + "\n" for line in written)
    if out is None:
        write(text)
    elif join().leads:
        try:
            write_text(out, text)
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror}") from None
