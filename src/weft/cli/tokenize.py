"""`weft tokenize`: show how a text is split into tokens."""

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


FILE_NAME = re.compile(r"\S*\w\.[A-Za-z]\w{1,5}(\.\w{2,3})?|(~|\.{1,2})?/\S+")  # what looks like a file name
STYLES = ("black on bright_cyan", "black on bright_yellow")  # of tokens, in turn


def tokenize(
    text: str = argument("TEXT", "A text, a file with the text, or - for standard input."),
    tokenizer: str = option(
        "bpe",
        "word, char, byte, bpe, wordpiece or unigram, trained on --data; or a run, a tokenizer.json, "
        "a SentencePiece model, tiktoken's ranks or a vocab.txt.",
    ),
    data: list[str] | None = option(None, "Text to train on (default: Python's documentation).", value="SOURCE"),
    vocab: int | None = option(None, "Vocabulary size of a tokenizer to train (default: 8192 for subwords).", min=1),
    ids: bool = flag("--ids", "Show the ids as well."),
    marks: bool = flag("--marks", "Show tokens as in the vocabulary, on one line: giv ##in, or ▁giv in."),
    json: bool = flag("--json", "Print one JSON object."),
) -> None:
    """Show how a text is split into tokens, and their number.

    On a terminal, tokens are coloured; otherwise each token is a line: its id, a tab and its text.

    $ weft tokenize 'It was a dark night' --tokenizer runs/gpt-tiny
    """
    from rich.console import Console

    from weft.data.sources import read_documents
    from weft.text.config import KINDS

    subject = _read_text(text)
    training_texts = (document.text for document in read_documents(data or ["builtin:python"]))
    loaded = find_tokenizer(tokenizer, vocab, lambda: training_texts)
    if data and (tokenizer not in KINDS or tokenizer == "byte"):
        raise ConfigError(f"--data {data[0]}: the tokenizer {tokenizer} needs no training; leave it out")
    spans = loaded.token_spans(subject)
    spellings = _spellings(loaded, spans)
    counts = {"tokens": len(spans), "characters": len(subject), "bytes": len(subject.encode())}
    counts_text = ", ".join(f"{count:,} {unit}" for unit, count in counts.items())
    ratio = counts["bytes"] / max(len(spans), 1)
    console = Console()
    if json:
        listed = [span._asdict() for span in spans]
        echo(dumps({**counts, "bytes_per_token": round(ratio, 4), "pieces": listed}, ensure_ascii=False))
    elif marks and not console.is_terminal:
        echo(" ".join(_marked(spans, spellings)))
    elif console.is_terminal:
        _print_coloured(
            console, spans, [f"{mark} " for mark in _marked(spans, spellings)] if marks else spellings, ids=ids
        )
        console.print(f"{counts_text}, {ratio:.2f} bytes per token", style="dim", highlight=False)
    else:
        for span, spelling in zip(spans, spellings, strict=True):
            echo(f"{span.id}\t{spelling!r}")


def _read_text(text: str) -> str:
    """Return the text itself, or the content of the file or stream that it names."""
    from weft.data.streams import characters

    try:
        if text == "-":
            return "".join(characters("-"))
        path = Path(text)
        if len(text) < 1024 and path.is_file():
            return path.read_bytes().decode("utf-8")
        if len(text) < 1024 and path.is_dir():
            log_to_stderr(f"weft: {text}: a folder; its name is tokenized (a run's tokenizer: --tokenizer {text})")
        elif FILE_NAME.fullmatch(text):
            log_to_stderr(f"weft: {text}: no such file; the name itself is tokenized")
        return text
    except UnicodeDecodeError as error:
        raise DataError(f"{text}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{text}: cannot be read: {error.strerror}") from None
    except ValueError:  # a path cannot contain NUL
        return text


def find_tokenizer(name: str, vocab: int | None, texts: Callable[[], Iterable[str]]) -> "Tokenizer":
    """Load a finished tokenizer by its path, or train one of a kind on `texts`."""
    from pydantic import TypeAdapter

    from weft.config import validate
    from weft.text.config import KINDS, TokenizerConfig
    from weft.text.tokenizer import Tokenizer, build_tokenizer

    kind, _, size = name.partition(":")  # bpe:8000
    if kind in KINDS and size.isdecimal() and vocab is None:
        name, vocab = kind, int(size)
    if name not in KINDS:
        if not Path(name).exists():
            near = suggestion(name, KINDS)
            raise ConfigError(f"--tokenizer {name}: not a kind of tokenizer, a file or a folder; {near}")
        if vocab is not None:
            raise ConfigError(f"--vocab {vocab}: {name} is a finished tokenizer; its vocabulary is fixed")
        return Tokenizer.load(name)
    settings = TypeAdapter(TokenizerConfig).validate_python({"kind": name})
    if vocab is not None:
        if "vocab_size" not in type(settings).model_fields:
            raise ConfigError(f"--vocab {vocab}: the vocabulary of a {name} tokenizer is fixed")
        settings = validate(type(settings), {"kind": name, "vocab_size": vocab}, "--vocab")
    return build_tokenizer(settings, [] if name == "byte" else texts())


def _spellings(tokenizer: "Tokenizer", spans: "list[TokenSpan]") -> list[str]:
    """Return each token's characters, or its bytes if it is only a part of a character."""
    shared = Counter((span.start, span.end) for span in spans)
    spellings = []
    for span in spans:
        if shared[span.start, span.end] == 1:
            spellings.append(span.text or span.token)
            continue
        content = tokenizer.token_bytes(span.id)
        try:
            spellings.append(content.decode())
        except UnicodeDecodeError:
            spellings.append("".join(f"<0x{byte:02X}>" for byte in content))
    return spellings


def _marked(spans: "list[TokenSpan]", spellings: list[str]) -> list[str]:
    """Return each token as in the vocabulary, with its ## or ▁; the space of a byte-level token becomes ▁ as well."""
    pairs = zip(spans, spellings, strict=True)
    tokens = [span.token if span.token.isascii() or "▁" in span.token else spelling for span, spelling in pairs]
    return [token.replace(" ", "▁") for token in tokens]


def _print_coloured(console: "Console", spans: "list[TokenSpan]", spellings: list[str], *, ids: bool) -> None:
    from rich.text import Text

    text = Text()
    for index, (span, spelling) in enumerate(zip(spans, spellings, strict=True)):
        style = STYLES[index % 2]
        visible = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in spelling)
        visible = f"│{visible}" if console.no_color and index else visible
        *lines, last = visible.split("\n")
        for line in lines:
            text.append(line + "⏎", style).append("\n")
        text.append(last, style)
        if ids:
            text.append(f" {span.id} ", "dim")
    console.print(text)
