"""`weft prepare`: text to token shards, once, for as many trainings as you like."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import print_json, print_tables
from weft.cli.tokenize import find_tokenizer
from weft.errors import ConfigError, TokenizerError
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.data.config import Split
    from weft.data.shards import Shards


def prepare(
    sources: list[str] = argument("SOURCE", "Files, folders, globs, '-', builtin:python or hub names."),
    out: Path = option(..., "The folder to write; an unfinished one is continued."),
    tokenizer: str | None = option(
        None, "A kind to train on this text (default: bpe), or a finished tokenizer.", value="KIND|RUN|PATH"
    ),
    vocab: int | None = option(None, "Vocabulary size of a tokenizer that is trained."),
    validation: str | None = option(
        None, "The share to hold out (default: 0.1; 0: none), or a source of its own.", value="SHARE|SOURCE"
    ),
    column: str | None = option(None, "The text's column in JSONL, CSV or Parquet (default: text).", value="NAME"),
    encoding: str | None = option(None, "The encoding of the files, such as cp1252 (default: utf-8).", value="NAME"),
    jobs: int | None = option(None, "Processes that encode (default: as many as there are processors).", min=1),
    part: str | None = option(None, "Prepare this part of the text alone, such as 3/16.", value="NUMBER/COUNT"),
    merge: bool = flag("--merge", "The SOURCEs are all parts of a text: put them together."),
    as_json: options.AsJson = False,
) -> None:
    """Turn text into token shards that training reads straight from disk.

    $ weft prepare texts/ --out tokens

    A large text can be divided over machines that see the same files, and put together afterwards, to the same bytes as
    one machine would have written:

    $ weft prepare texts/ --tokenizer RUN --part 1/2 --out one

    $ weft prepare texts/ --tokenizer RUN --part 2/2 --out two

    $ weft prepare --merge one two --out tokens
    """
    from weft.config import validate
    from weft.data.config import Data, TextSource
    from weft.data.prepare import merge as put_together
    from weft.data.prepare import parse_part
    from weft.data.prepare import prepare as write
    from weft.data.sources import is_plain
    from weft.data.split import train_texts

    if merge:
        given = {"tokenizer": tokenizer, "vocab": vocab, "validation": validation, "column": column}
        given |= {"encoding": encoding, "jobs": jobs, "part": part}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"--{name} {value}: the parts are made already; with --merge leave it out")
        _report(put_together(sources, out), as_json)
        return
    if column is not None and all(map(is_plain, sources)):
        raise ConfigError(f"--column {column}: {sources[0]} is plain text, which has no columns")
    read = validate(Data, {"encoding": encoding or "utf-8"})
    number = None if part is None else parse_part(part)
    text = TextSource(sources, _split(validation or "0.1"), column or "text", read.encoding, number)
    name = tokenizer or "bpe"

    def learned() -> Iterable[str]:
        if part is not None:
            raise TokenizerError(
                f"--part {part}: all parts need the same finished tokenizer; train one on some of the text, for "
                f"instance with weft prepare FILE --tokenizer {name} --out first, and give --tokenizer first"
            )
        if "-" in sources:
            raise TokenizerError("'-': standard input can be read once only; give a finished tokenizer, or name a file")
        return train_texts(text)

    _report(write(text, out, find_tokenizer(name, vocab, learned), jobs=jobs), as_json)


def _split(validation: str) -> "Split":
    from weft.config import validate
    from weft.data.config import FilesSplit, HashSplit, NoSplit

    try:
        share = float(validation)
    except ValueError:
        return FilesSplit(sources=(validation,))
    return validate(HashSplit, {"fraction": share}, "--validation") if share else NoSplit()


def _report(shards: "Shards", as_json: bool) -> None:
    splits = {split: shards.of(split) for split in ("train", "validation")}
    made = {
        split: {
            "tokens": sum(shard.tokens for shard in each),
            "documents": sum(shard.documents for shard in each),
            "bytes": sum(shard.bytes for shard in each),
            "shards": len(each),
        }
        for split, each in splits.items()
    }
    index, fingerprint = shards.index, shards.fingerprint
    if as_json:
        facts = {"path": shards.path, "vocab_size": index.vocab_size, "dtype": index.dtype, "sha256": fingerprint}
        print_json({**facts, "splits": made})
        return
    rows = []
    for split, each in made.items():
        ratio = f"{each['bytes'] / each['tokens']:.2f}" if each["tokens"] else "–"
        counts = [f"{each[what]:,}" for what in ("tokens", "documents", "bytes")]
        rows.append((split, *counts, ratio, str(each["shards"])))
    print_tables(Table(("split", "tokens", "documents", "bytes", "bytes/token", "shards"), rows))
    typer.echo(f"vocabulary {index.vocab_size:,}, {index.dtype}, sha256 {fingerprint[:16]}")
    typer.echo(f"written to {shards.path}")
