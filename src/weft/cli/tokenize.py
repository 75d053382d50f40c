"""`weft tokenize`: how a text is cut."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import echo
from weft.errors import ConfigError, DataError, suggestion
from weft.progress import log_to_stderr

if TYPE_CHECKING:
    from rich.console import Console

    from weft.text.tokenizer import Tokenizer, TokenSpan


FILE_NAME = re.compile(r"\S*\w\.[A-Za-z]\w{1,5}(\.\w{2,3})?|(~|\.{1,2})?/\S+")  # what looks like one


def tokenize(
    text: str = argument("TEXT", "A text, a file that holds it, or - for stdin."),
    tokenizer: str = option(
        "bpe",
        "word, char, byte, bpe, wordpiece or unigram, trained on --data; or a run, a tokenizer.json, "
        "a SentencePiece model, tiktoken's ranks or a vocab.txt.",
    ),
    data: list[str] | None = option(
        None, "Text to train the tokenizer on; built-in documentation if not given.", value="SOURCE"
    ),
    vocab: int | None = option(None, "Vocabulary size of a tokenizer that is trained (8192 for subwords).", min=1),
    ids: bool = flag("--ids", "Show the ids too."),
    json: bool = flag("--json", "Print one JSON object."),
) -> None:
    """Show how a text is split into tokens, and how many there are.

    On a terminal the tokens are coloured; otherwise there is one line per token: its id, a tab and its text.

    $ weft tokenize 'It was a dark night' --tokenizer runs/gpt-tiny
    """
    from rich.console import Console

    from weft.data.sources import read_documents
    from weft.text.config import KINDS

    subject = _subject(text)
    learned = (document.text for document in read_documents(data or ["builtin:python"]))
    cutter = find_tokenizer(tokenizer, vocab, lambda: learned)
    if data and (tokenizer not in KINDS or tokenizer == "byte"):
        raise ConfigError(f"--data {data[0]}: the tokenizer {tokenizer} isn't trained; leave it out")
    spans = cutter.token_spans(subject)
    faces = _faces(cutter, spans)
    counts = {"tokens": len(spans), "characters": len(subject), "bytes": len(subject.encode())}
    counts_text = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    ratio = counts["bytes"] / max(len(spans), 1)
    console = Console()
    if json:
        listed = [span._asdict() for span in spans]
        echo(dumps({**counts, "bytes_per_token": round(ratio, 4), "pieces": listed}, ensure_ascii=False))
    elif console.is_terminal:
        _show(console, spans, faces, ids)
        console.print(f"{counts_text}, {ratio:.2f} bytes per token", style="dim", highlight=False)
    else:
        for span, face in zip(spans, faces, strict=True):
            echo(f"{span.id}\t{face!r}")


def _subject(text: str) -> str:
    from weft.data.streams import characters

    try:
        if text == "-":
            return "".join(characters("-"))
        path = Path(text)
        if len(text) < 1024 and path.is_file():
            return path.read_bytes().decode("utf-8")
        if FILE_NAME.fullmatch(text):
            log_to_stderr(f"weft: {text}: there is no such file, so this name itself is the text")
        return text
    except UnicodeDecodeError as error:
        raise DataError(f"{text}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{text}: cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL is no part of a path
        return text


def find_tokenizer(name: str, vocab: int | None, texts: Callable[[], Iterable[str]]) -> "Tokenizer":
    """A finished tokenizer by its path, or one of a kind, trained on `texts` where it has something to learn."""
    from pydantic import TypeAdapter

    from weft.config import validate
    from weft.text.config import KINDS, TokenizerConfig
    from weft.text.tokenizer import Tokenizer, build_tokenizer

    kind, _, size = name.partition(":")  # bpe:8000
    if kind in KINDS and size.isdecimal() and vocab is None:
        name, vocab = kind, int(size)
    if name not in KINDS:
        if not Path(name).exists():
            raise ConfigError(f"--tokenizer {name}: neither a kind nor a file or folder; {suggestion(name, KINDS)}")
        if vocab is not None:
            raise ConfigError(f"--vocab {vocab}: {name} is a finished tokenizer, with a vocabulary of its own")
        return Tokenizer.load(name)
    settings = TypeAdapter(TokenizerConfig).validate_python({"kind": name})
    if vocab is not None:
        if "vocab_size" not in type(settings).model_fields:
            raise ConfigError(f"--vocab {vocab}: a {name} tokenizer has a vocabulary of its own")
        settings = validate(type(settings), {"kind": name, "vocab_size": vocab}, "--vocab")
    return build_tokenizer(settings, [] if name == "byte" else texts())


def _faces(cutter: "Tokenizer", spans: "list[TokenSpan]") -> list[str]:
    """What a person sees of each token: its characters, or its bytes where it is only a part of one."""
    shared = Counter((span.start, span.end) for span in spans)
    faces = []
    for span in spans:
        if shared[span.start, span.end] == 1:
            faces.append(span.text or span.token)
            continue
        spelled = cutter.token_bytes(span.id)
        try:
            faces.append(spelled.decode())
        except UnicodeDecodeError:
            faces.append("".join(f"<0x{byte:02X}>" for byte in spelled))
    return faces


def _show(console: "Console", spans: "list[TokenSpan]", faces: list[str], ids: bool) -> None:
    from rich.text import Text

    backgrounds = ("black on bright_cyan", "black on bright_yellow")
    shown = Text()
    for place, (span, face) in enumerate(zip(spans, faces, strict=True)):
        seen = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in face)  # tabs are shown, too
        seen = f"│{seen}" if console.no_color and place else seen
        *lines, rest = seen.split("\n")
        for line in lines:
            shown.append(line + "⏎", backgrounds[place % 2]).append("\n")
        shown.append(rest, backgrounds[place % 2])
        if ids:
            shown.append(f" {span.id} ", "dim")
    console.print(shown)
