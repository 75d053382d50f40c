"""`weft translate`: a line from every line."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.distributed import load_together, together
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading, write
from weft.errors import ConfigError, DataError
from weft.storage.files import check_place, write_text


@together
def translate(
    run: options.Run,
    file: str = argument("FILE", "Lines of text; standard input if not given.", default="-"),
    beam: int | None = option(None, "The width of beam search; 1 is greedy (default: the checkpoint's, or 5).", min=1),
    length_penalty: float | None = option(
        None, "Divide scores by length to this power; higher favours long answers (default: the checkpoint's, or 1)."
    ),
    coverage_penalty: float | None = option(
        None, "Lower the score of answers that leave out parts of the line (default: 0).", min=0.0
    ),
    patience: float | None = option(
        None,
        "End the search once this many times the beam's width of answers are complete "
        "(default: the checkpoint's, or 1).",
    ),
    max_tokens: int | None = option(
        None, "The longest answer, in tokens (default: twice the line's and 50, up to the run's length).", min=1
    ),
    reads: str | None = option(None, "The lines' language, for a multilingual model: en_XX.", "--from", value="CODE"),
    writes: str | None = option(None, "The language to write, for a multilingual model.", "--to", value="CODE"),
    special_tokens: options.SpecialTokens = False,
    out: Path | None = option(None, "The file to write to (default: standard output)."),
    as_json: bool = flag("--json", "Write lines of JSON, each with a text and its translation."),
) -> None:
    """Translate a file line by line, or whatever the run learned to write from a text. Blank lines stay blank.

    $ weft translate runs/vaswani-tiny lines.en --out lines.de
    """
    with loading():
        from weft.api.settings import beam as beam_settings
        from weft.api.settings import with_defaults
        from weft.decode.translate import LENGTH_RATIO
        from weft.objectives.frame import LanguagePair
        from weft.parallel.ranks import join
    from weft.data.streams import lines
    from weft.progress import bar
    from weft.runs.lines import record

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
    ratio = LENGTH_RATIO if max_tokens is None else None
    with bar("translating", len(read)) as advance:
        written = loaded.translate(read, settings, LanguagePair(reads, writes), progress=advance, ratio=ratio)
    if as_json:
        pairs = zip(read, written, strict=True)
        answers = [record({"text": source, "translation": target}) for source, target in pairs]
    else:
        answers = [line.replace("\n", " ") for line in written]
    text = "".join(f"{line}\n" for line in answers)
    if out is None:
        write(text)
    elif join().leads:
        try:
            write_text(out, text)
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror}") from None
