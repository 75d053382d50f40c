"""`weft translate`: translate a file line by line."""

from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import options
from weft.cli.console.distributed import distributed_command, load_sharded
from weft.cli.console.generation import Settings, generation_options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading, write
from weft.decode.config import TRANSLATION_DEFAULTS
from weft.errors import ConfigError, os_errors
from weft.storage.files import check_writable, write_text

if TYPE_CHECKING:
    from weft.decode.config import Beam

SCORING = ("length_penalty", "coverage_penalty", "patience")


@distributed_command
@generation_options(
    "beams length_penalty coverage_penalty patience max_tokens",
    defaults={
        "beams": f"the checkpoint's, or {TRANSLATION_DEFAULTS['beams']}",
        "length_penalty": "the checkpoint's, or 1",
        "coverage_penalty": "0",
        "patience": f"the checkpoint's, or {TRANSLATION_DEFAULTS['patience']:g}",
        "max_tokens": "twice the line's and 50, up to the run's length",
    },
    panels={},
)
def translate(
    run: options.Run,
    settings: Settings,
    file: str = argument("FILE", "Lines of text (default: standard input).", default="-"),
    source: str | None = option(None, "The language of the lines, if multilingual: en_XX.", "--from", value="CODE"),
    target: str | None = option(None, "The language to translate to, if multilingual.", "--to", value="CODE"),
    special_tokens: options.SpecialTokens = False,
    out: Path | None = option(None, "The file to write to (default: standard output)."),
    as_json: bool = flag("--json", "Write lines of JSON, each with a text and its translation."),
) -> None:
    """Translate a file line by line, or generate whatever else the run has learned to generate from a text.

    Blank lines stay blank.

    $ weft translate runs/vaswani-tiny lines.en --out lines.de
    """
    with loading():
        from weft.api.settings import beam, with_defaults
        from weft.decode.translate import LENGTH_RATIO
        from weft.objectives.frame import LanguagePair
        from weft.parallel.ranks import join
    from weft.data.streams import lines
    from weft.progress import bar
    from weft.runs.lines import record

    def check(beams: int | None) -> None:
        for name in SCORING:
            if beams == 1 and name in settings:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {settings[name]}: a beam of 1 compares no scores; leave it out")

    def search(defaults: Settings) -> "Beam":
        power = settings.get("length_penalty")
        penalty = None if power is None else {"kind": "power", "alpha": power}
        return beam(**with_defaults({**settings, "length_penalty": penalty}, defaults))

    check(settings.get("beams"))
    search({})  # refuse invalid settings before anything is loaded
    if out is not None:
        check_writable(out)
    sources = join().share(lambda: [line.rstrip("\r\n") for line in lines(file)])  # lines end as in training
    loaded = load_sharded(run, special_tokens=special_tokens)
    defaults = {**TRANSLATION_DEFAULTS, "max_tokens": loaded.config.batch.length}
    chosen = search(defaults | loaded.beam_defaults)
    check(chosen.beams)
    ratio = None if "max_tokens" in settings else LENGTH_RATIO
    with bar("translating", len(sources)) as advance:
        translations = loaded.translate(sources, chosen, LanguagePair(source, target), progress=advance, ratio=ratio)
    if as_json:
        pairs = zip(sources, translations, strict=True)
        output = [record({"text": text, "translation": translation}) for text, translation in pairs]
    else:
        output = [line.replace("\n", " ") for line in translations]
    text = "".join(f"{line}\n" for line in output)
    if out is None:
        write(text)
    elif join().leads:
        with os_errors(out, verb="written"):
            write_text(out, text)
