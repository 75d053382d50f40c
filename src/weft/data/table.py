"""Rows with named, validated columns: from tables, JSON, parallel text files and built-in tasks.

An unusable row raises an error that names its file and line, or is skipped and counted. A damaged file, or one that
lacks a column altogether, always raises.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from weft.data.messages import conversation
from weft.data.rows import TABLES, Malformed, MissingColumnError, RowError, records
from weft.data.shards import Side
from weft.data.sources import find_files, find_matches, identity
from weft.data.streams import format_of, lines, no_such_file
from weft.errors import DataError, suggestion
from weft.progress import warn
from weft.storage.files import is_text
from weft.text import builtin

# text: non-empty; optional: text, may be empty; label: text or an integer; number: any finite number; words: a list of
# words, or text split at white space; messages: a conversation, made from the whole row
Kind = Literal["text", "optional", "label", "number", "words", "messages"]


@dataclass(frozen=True)
class RowSource:
    """Rows to read. A text file has one row per line, with the column `text`; `builtin:NAME` is a built-in task."""

    sources: Sequence[str]
    columns: Mapping[str, Kind]  # if all are integers, they index, from 0, the columns of a table without a header
    targets: Sequence[str] = ()  # text files whose line i belongs to line i of the source: `source` and `target`
    on_error: Literal["stop", "skip"] = "stop"  # an unreadable row raises an error, or is skipped and counted
    encoding: str = "utf-8"
    held_out: Sequence[str] = ()  # files that are not read


class Row(NamedTuple):
    """Values of a row's columns, its location (`file.tsv:17`), and its side of the split."""

    values: dict[str, Any]
    where: str
    side: Side = "train"


@dataclass
class SkippedRows:
    """Counts of skipped rows by reason: an error's message up to its first colon or semicolon."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason → location of its first row

    def add(self, reason: str, where: str) -> None:
        short = re.split(r"[:;] ", reason, maxsplit=1)[0]
        self.counts[short] += 1
        self.first.setdefault(short, where)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        parts = [f"{count} × {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]
        return f"{self.total} {'row was' if self.total == 1 else 'rows were'} skipped: {'; '.join(parts)}"


def read_rows(source: RowSource, side: Side = "train", skipped: SkippedRows | None = None) -> Iterator[Row]:
    """Yield the rows of all sources, in order; of a built-in task, those of `side`."""
    assert source.columns, "no column is requested"
    skipped = SkippedRows() if skipped is None else skipped
    before, is_empty = skipped.total, True
    names = find_files(source.sources, log=warn, held_out=source.held_out) if not source.targets else ()
    file_rows = ((f"{name}:{number}", row) for name in names for number, row in _read_file(name, source, side))
    for where, record in _read_parallel(source) if source.targets else file_rows:
        try:
            if isinstance(record, Malformed):
                raise DataError(record.reason)
            values = {name: _parse_value(record, name, kind) for name, kind in source.columns.items()}
        except DataError as error:
            line = f"{where}: {error}"
            if source.on_error == "stop" and isinstance(error, MissingColumnError):
                raise MissingColumnError(line, error.column) from None
            if source.on_error == "stop":
                raise RowError(line) from None
            skipped.add(str(error), where)
            continue
        is_empty = False
        yield Row(values, where, side)
    if is_empty:
        shown = ", ".join(source.sources) or "no source given"
        raise DataError(f"{shown}: no rows at all" + (f"; {skipped}" if skipped.total > before else ""))


def read_texts(name: str, column: str | None = None, default_column: str = "text") -> list[str]:
    """Read the texts of a file: one per line, or one per row of a table or of JSON, in `column` or in the
    `default_column`. `-` is standard input, one text per line."""
    column = column or ("text" if has_lines(name) else default_column)
    if name != "-":
        try:
            return [row.values[column] for row in read_rows(RowSource([name], {column: "text"}))]
        except MissingColumnError as error:
            raise DataError(f"{error}; choose one with --column NAME") from None
    if column != "text":
        raise DataError(f"standard input: one text per line, without a column '{column}'; name a file that has columns")
    texts = [line.strip() for line in lines(name)]
    empty = next((number for number, text in enumerate(texts, 1) if not text), None)
    if empty is not None:
        raise DataError(f"standard input, line {empty}: empty; expected a text in every line")
    if not texts:
        raise DataError("standard input: contains no text")
    return texts


def has_lines(name: str) -> bool:
    """Return whether a file has one text per line: it is not a table."""
    return format_of(name) not in TABLES


def _read_file(name: str, source: RowSource, side: Side) -> Iterator[tuple[int, Any]]:
    if name.startswith("hub:"):
        raise DataError(f"{name.removeprefix('hub:')}: no such file; to read rows of a hub dataset, download it first")
    if name in builtin.TASK_SOURCES:
        return enumerate(builtin.task_rows(name.removeprefix("builtin:"), side), 1)
    if name.startswith("builtin:"):
        corpus = name.removeprefix("builtin:")
        if corpus not in builtin.CORPORA:
            raise DataError(f"{name}: no such task or corpus; {suggestion(corpus, [*builtin.TASKS, *builtin.CORPORA])}")
        return enumerate(({"text": text} for text in builtin.corpus(corpus).documents), 1)
    if name != "-" and format_of(name) not in TABLES:
        return ((number, {"text": line}) for number, line in enumerate(_lines(name, source.encoding), 1))
    needed = [column for column, kind in source.columns.items() if kind not in ("optional", "messages")]
    return records(name, needed, every=len(needed) < len(source.columns), encoding=source.encoding)


def _read_parallel(files: RowSource) -> Iterator[tuple[str, Any]]:
    sources, targets = _text_files(files.sources), _text_files(files.targets)
    if len(sources) != len(targets):
        names = ", ".join([*sources[:2], *targets[:2]])
        found = f"{len(sources)} source files and {len(targets)} target files ({names} …)"
        raise DataError(f"{found}: each source needs its target")
    validation, seen = set(map(identity, _text_files(files.held_out))), set[Any]()
    for source, target in zip(sources, targets, strict=True):
        pair = identity(source), identity(target)
        if pair in seen or pair[0] in validation:
            why = "held out for validation" if pair[0] in validation else "the same files as others that are read"
            warn(f"{source}, {target}: skipped ({why})")
            continue
        seen.add(pair)
        first = second = 0
        for text, translation in zip_longest(_lines(source, files.encoding), _lines(target, files.encoding)):
            first, second = first + (text is not None), second + (translation is not None)
            if text is not None and translation is not None:
                yield f"{source}:{first}, {target}:{second}", {"source": text, "target": translation}
        if first != second:
            found = f"{source} has {first} lines, {target} has {second}"
            raise DataError(f"{found}: line i of one belongs to line i of the other")


def _text_files(sources: Sequence[str]) -> list[str]:
    """Text files with any suffix: parallel files are often named after their languages."""
    files: list[str] = []
    for source in sources:
        if format_of(source) in TABLES:
            raise DataError(f"{source}: a table has both sides in its columns; leave out the target files")
        is_file = os.path.isfile(source)
        matches = [source] if is_file else [path for path, _ in find_matches(source) if os.path.isfile(path)]
        if not matches:
            raise no_such_file(source)
        files += matches
    return files


def _lines(name: str, encoding: str) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in lines(name, encoding))


def _parse_value(record: Any, column: str, kind: Kind) -> Any:
    if kind == "messages":
        return conversation(record, column)
    if isinstance(record, str):
        record = {"text": record}
    elif isinstance(record, list):
        record = {str(index): value for index, value in enumerate(record)}
    elif not isinstance(record, Mapping):
        raise DataError(f"a row is an object with columns: this one is {type(record).__name__}")
    if column not in record and kind != "optional":
        raise MissingColumnError.among(column, record)
    value = record.get(column)
    match kind:
        case "text" | "optional":
            return _parse_text(value, column, optional=kind == "optional")
        case "label":
            return _parse_label(value, column)
        case "number":
            return _parse_number(value, column)
        case "words":
            words = value.split() if isinstance(value, str) else value
            if not isinstance(words, list) or not words:
                raise DataError(f"'{column}' is not a list of words, or is empty")
            return [_parse_label(word, column) for word in words]


def _parse_text(value: Any, column: str, *, optional: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise DataError(f"'{column}' holds {type(value).__name__}, not text")
    value = (value or "").strip()
    if not value and not optional:
        raise DataError(f"'{column}' is empty")
    if "\0" in value or not is_text(value):
        raise DataError(f"'{column}' contains a NUL character or a lone surrogate, which are not text")
    return value


def _parse_label(value: Any, column: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return _parse_text(value, column)


def _parse_number(value: Any, column: str) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"'{column}' is empty")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"'{column}' is not a finite number: {str(value)[:40]!r}")
    return number
