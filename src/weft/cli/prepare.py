"""`weft prepare`: text to token shards, once, for as many trainings as you like."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weft.data.config import Split, TextSource
    from weft.data.shards import Shards
    from weft.text.tokenizer import Tokenizer


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Files, folders, globs, '-', builtin:python or hub names."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; an unfinished one is continued.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="KIND|RUN|PATH", help="A kind to train on this text, or a finished tokenizer.")
    ] = "bpe",
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size of a tokenizer that is trained.")] = None,
    validation: Annotated[
        str, typer.Option(metavar="SHARE|SOURCE", help="The share to hold out (0: none), or a source of its own.")
    ] = "0.1",
    column: Annotated[
        str | None, typer.Option(help="The column of JSONL, CSV or Parquet that holds the text (default: text).")
    ] = None,
) -> None:
    """Turn text into token shards that training reads straight from disk."""
    from weft.data.config import TextSource
    from weft.data.documents import is_plain
    from weft.data.prepare import prepare as write
    from weft.errors import ConfigError

    if column is not None and all(map(is_plain, sources)):
        raise ConfigError(f"--column {column}: {sources[0]} is plain text, which has no columns")
    text = TextSource(sources, _split(validation), column or "text")
    _report(write(text, out, _tokenizer(text, tokenizer, vocab)))


def _split(validation: str) -> "Split":
    from weft.config import validate
    from weft.data.config import FilesSplit, HashSplit, NoSplit

    try:
        share = float(validation)
    except ValueError:
        return FilesSplit(sources=(validation,))
    return validate(HashSplit, {"fraction": share}, "--validation") if share else NoSplit()


def _tokenizer(text: "TextSource", name: str, vocab: int | None) -> "Tokenizer":
    """A finished tokenizer by its path, or one of a kind, trained on the training side of the text."""
    from pydantic import TypeAdapter

    from weft.config import validate
    from weft.data.split import train_texts
    from weft.errors import ConfigError, TokenizerError, suggestion
    from weft.text.config import KINDS, TokenizerConfig
    from weft.text.tokenizer import Tokenizer, build_tokenizer

    if name not in KINDS:
        if not Path(name).exists():
            raise TokenizerError(f"--tokenizer {name}: neither a kind nor a file or folder; {suggestion(name, KINDS)}")
        if vocab is not None:
            raise ConfigError(f"--vocab {vocab}: {name} is a finished tokenizer, with a vocabulary of its own")
        return Tokenizer.load(name)
    config = TypeAdapter(TokenizerConfig).validate_python({"kind": name})
    if vocab is not None:
        if "vocab_size" not in type(config).model_fields:
            raise ConfigError(f"--vocab {vocab}: a {name} tokenizer has a vocabulary of its own")
        config = validate(type(config), {"kind": name, "vocab_size": vocab}, "--vocab")
    if name == "byte":  # nothing to learn
        return build_tokenizer(config, [])
    if "-" in text.sources:
        raise TokenizerError("'-': standard input can be read once only; give a finished tokenizer, or name a file")
    return build_tokenizer(config, train_texts(text))


def _report(shards: "Shards") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("split", "tokens", "documents", "bytes", "bytes/token", "shards", box=None)
    for split in ("train", "validation"):
        made = shards.of(split)
        tokens = sum(shard.tokens for shard in made)
        size = sum(shard.bytes for shard in made)
        documents = sum(shard.documents for shard in made)
        ratio = f"{size / tokens:.2f}" if tokens else "–"
        table.add_row(split, f"{tokens:,}", f"{documents:,}", f"{size:,}", ratio, str(len(made)))
    console = Console()
    console.print(table)
    console.print(f"vocabulary {shards.index.vocab_size:,}, {shards.index.dtype}, sha256 {shards.fingerprint[:16]}")
    console.print(f"written to {shards.path}", soft_wrap=True)
