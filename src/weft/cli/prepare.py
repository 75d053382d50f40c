"""`weft prepare`: turn text into token shards once, for any number of trainings."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import print_json, print_tables
from weft.cli.tokenize import find_tokenizer
from weft.errors import ConfigError, TokenizerError, quoted
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.data.config import Split
    from weft.data.shards import Shards

COUNTED = ("tokens", "documents", "bytes")  # of a shard


def prepare(
    sources: list[str] = argument("SOURCE", "Files, folders, globs, '-', builtin:python or hub names."),
    out: Path = option(..., "The folder to write; an unfinished one is continued."),
    tokenizer: str | None = option(None, "A kind to train (default: bpe), or a finished one.", value="KIND|RUN|PATH"),
    vocab: int | None = option(None, "Vocabulary size of a tokenizer that is trained."),
    validation: str | None = option(None, "The held-out share (default: 0.1), or a source.", value="SHARE|SOURCE"),
    column: str | None = option(None, "The text's column in JSONL, CSV or Parquet (default: text).", value="NAME"),
    encoding: str | None = option(None, "The encoding of the files, such as cp1252 (default: utf-8).", value="NAME"),
    jobs: int | None = option(None, "Processes that tokenize (default: one per processor).", min=1),
    part: str | None = option(None, "Prepare only this part of the text, such as 3/16.", value="NUMBER/COUNT"),
    merge: bool = flag("--merge", "Merge the parts of a text, which are the SOURCEs."),
    as_json: options.AsJson = False,
) -> None:
    """Turn text into token shards that training reads directly from disk.

    $ weft prepare texts/ --out tokens

    Several machines that share the files can prepare parts of a large text; the merged result has the same bytes as
    that of one machine:

    $ weft prepare texts/ --tokenizer RUN --part 1/2 --out one

    $ weft prepare texts/ --tokenizer RUN --part 2/2 --out two

    $ weft prepare --merge one two --out tokens
    """
    from weft.config import validate
    from weft.data.config import Data, TextSource
    from weft.data.prepare import merge as merge_parts
    from weft.data.prepare import parse_part
    from weft.data.prepare import prepare as prepare_shards
    from weft.data.sources import is_plain
    from weft.data.split import train_texts

    if merge:
        unused = {"tokenizer": tokenizer, "vocab": vocab, "validation": validation, "column": column}
        unused |= {"encoding": encoding, "jobs": jobs, "part": part}
        for name, value in unused.items():
            if value is not None:
                raise ConfigError(f"--{name} {value}: the parts are already prepared; leave it out with --merge")
        _print_summary(merge_parts(sources, out), as_json)
        return
    if column is not None and all(map(is_plain, sources)):
        raise ConfigError(f"--column {column}: {sources[0]} is plain text, which has no columns")
    data = validate(Data, {"encoding": encoding or "utf-8"})
    split, numbers = _split(validation or "0.1"), None if part is None else parse_part(part)
    text = TextSource(sources, split, column or "text", data.encoding, numbers)
    name = tokenizer or "bpe"

    def training_texts() -> Iterable[str]:
        if part is not None:
            raise TokenizerError(
                f"--part {part}: all parts need the same finished tokenizer; train one on a sample of the text, for "
                f"instance with weft prepare FILE --tokenizer {quoted(name)} --out first, and give --tokenizer first"
            )
        if "-" in sources:
            raise TokenizerError("'-': standard input can be read only once; give a finished tokenizer, or name a file")
        return train_texts(text)

    shards = prepare_shards(text, out, find_tokenizer(name, vocab, training_texts), jobs=jobs)
    _print_summary(shards, as_json)


def _split(validation: str) -> "Split":
    from weft.config import validate
    from weft.data.config import FilesSplit, HashSplit, NoSplit

    try:
        share = float(validation)
    except ValueError:
        return FilesSplit(sources=(validation,))
    return validate(HashSplit, {"fraction": share}, "--validation") if share else NoSplit()


def _print_summary(shards: "Shards", as_json: bool) -> None:
    totals: dict[str, dict[str, int]] = {}
    for split in ("train", "validation"):
        parts = shards.of(split)
        totals[split] = {key: sum(getattr(shard, key) for shard in parts) for key in COUNTED} | {"shards": len(parts)}
    index, fingerprint = shards.index, shards.fingerprint
    if as_json:
        facts = {"path": shards.path, "vocab_size": index.vocab_size, "dtype": index.dtype, "sha256": fingerprint}
        print_json({**facts, "splits": totals})
        return
    rows = []
    for split, total in totals.items():
        ratio = f"{total['bytes'] / total['tokens']:.2f}" if total["tokens"] else "–"
        rows.append((split, *(f"{total[key]:,}" for key in COUNTED), ratio, str(total["shards"])))
    print_tables(Table(("split", *COUNTED, "bytes/token", "shards"), rows))
    typer.echo(f"vocabulary {index.vocab_size:,}, {index.dtype}, sha256 {fingerprint[:16]}")
    typer.echo(f"written to {shards.path}")
