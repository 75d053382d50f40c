"""Rows with named columns, for tasks: from tables, JSON, parallel text files and built-in tasks, each checked.

A row that cannot be used stops the reading with one line that names its file and line, or is counted and left out.
A file that is damaged, or lacks a column altogether, stops it either way.
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
from weft.data.patterns import identity, matching
from weft.data.rows import TABLES, Malformed, MissingColumnError, RowError, records
from weft.data.shards import Side
from weft.data.sources import files, no_such_file
from weft.data.streams import format_of, lines
from weft.errors import DataError, suggestion
from weft.progress import warn
from weft.storage.files import is_text
from weft.text import builtin

# text: some text; optional: text, or nothing; label: a name, or a whole number; number: any; words: a list of words,
# or text that white space cuts into them; messages: a conversation, made from the row as a whole
Kind = Literal["text", "optional", "label", "number", "words", "messages"]


@dataclass(frozen=True)
class RowSource:
    """Rows to read: where they are, which columns are wanted, and what each of these holds.

    Columns that are all whole numbers are places, from 0, in a table without a header. With `targets` the sources are
    text files, and line i of each belongs to line i of its target: the columns `source` and `target`. A text file alone
    has a row a line, in the column `text`. `builtin:NAME` is a built-in task. Files that are `held_out` as well
    aren't read. A row that cannot be read stops the reading, or is skipped and counted.
    """

    sources: Sequence[str]
    columns: Mapping[str, Kind]
    targets: Sequence[str] = ()
    on_error: Literal["stop", "skip"] = "stop"
    encoding: str = "utf-8"
    held_out: Sequence[str] = ()


class Row(NamedTuple):
    """The wanted columns of a row, its place (`file.tsv:17`), and its side of the split."""

    values: dict[str, Any]
    where: str
    side: Side = "train"


@dataclass
class Skipped:
    """How many rows were left out, and why. A reason is an error's text up to its first colon or semicolon."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first

    def add(self, reason: str, where: str) -> None:
        short = re.split(r"[:;] ", reason, maxsplit=1)[0]
        self.counts[short] += 1
        self.first.setdefault(short, where)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        parts = [f"{count} × {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]
        return f"{self.total} {'row was' if self.total == 1 else 'rows were'} left out: {'; '.join(parts)}"


def read_rows(source: RowSource, side: Side = "train", skipped: Skipped | None = None) -> Iterator[Row]:
    """The rows of all sources, in order; of a built-in task those of `side`."""
    kinds = source.columns
    assert kinds, "no column is wanted"
    skipped = Skipped() if skipped is None else skipped
    before, found = skipped.total, False
    named = files(source.sources, tell=warn, held_out=source.held_out) if not source.targets else ()
    files_rows = ((f"{name}:{number}", row) for name in named for number, row in _file(name, source, side))
    for where, record in _parallel(source) if source.targets else files_rows:
        try:
            if isinstance(record, Malformed):
                raise DataError(record.reason)
            values = {name: _value(record, name, kind) for name, kind in kinds.items()}
        except DataError as error:
            line = f"{where}: {error}"
            if source.on_error == "stop" and isinstance(error, MissingColumnError):
                raise MissingColumnError(line, error.column) from None
            if source.on_error == "stop":
                raise RowError(line) from None
            skipped.add(str(error), where)
            continue
        found = True
        yield Row(values, where, side)
    if not found:
        names = ", ".join(source.sources) or "no source given"
        raise DataError(f"{names}: no rows at all" + (f"; {skipped}" if skipped.total > before else ""))


def read_texts(name: str, column: str | None = None, usual: str = "text") -> list[str]:
    """The texts of a file: one a line, or one a row of a table or of JSON; `-` is standard input, one text a line. Rows
    have it in `column`, or in the `usual` one."""
    column = column or ("text" if has_lines(name) else usual)
    if name != "-":
        try:
            return [row.values[column] for row in read_rows(RowSource([name], {column: "text"}))]
        except MissingColumnError as error:
            raise DataError(f"{error}; choose one with --column NAME") from None
    if column != "text":
        raise DataError(f"standard input: one text a line, without a column '{column}'; name a file that has columns")
    found = [line.strip() for line in lines(name)]
    empty = next((number for number, text in enumerate(found, 1) if not text), None)
    if empty is not None:
        raise DataError(f"standard input, line {empty}: empty; expected a text in every line")
    if not found:
        raise DataError("standard input: holds no text")
    return found


def has_lines(name: str) -> bool:
    return format_of(name) not in TABLES


def _file(name: str, source: RowSource, side: Side) -> Iterator[tuple[int, Any]]:
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


def _parallel(given: RowSource) -> Iterator[tuple[str, Any]]:
    left, right = _text_files(given.sources), _text_files(given.targets)
    if len(left) != len(right):
        found = f"{len(left)} source files and {len(right)} target files ({', '.join([*left[:2], *right[:2]])} …)"
        raise DataError(f"{found}: each source needs its target")
    apart, seen = set(map(identity, _text_files(given.held_out))), set[Any]()
    for name, other in zip(left, right, strict=True):
        pair = identity(name), identity(other)
        if pair in seen or pair[0] in apart:
            why = "held out for validation" if pair[0] in apart else "the same files as others that are read"
            warn(f"{name}, {other}: left out ({why})")
            continue
        seen.add(pair)
        first = second = 0
        for source, target in zip_longest(_lines(name, given.encoding), _lines(other, given.encoding)):
            first, second = first + (source is not None), second + (target is not None)
            if source is not None and target is not None:
                yield f"{name}:{first}, {other}:{second}", {"source": source, "target": target}
        if first != second:
            found = f"{name} has {first} lines, {other} has {second}"
            raise DataError(f"{found}: line i of one belongs to line i of the other")


def _text_files(sources: Sequence[str]) -> list[str]:
    """Text files with any suffix: parallel ones are often named after their languages."""
    found: list[str] = []
    for source in sources:
        if format_of(source) in TABLES:
            raise DataError(f"{source}: a table has both sides in its columns; leave out the target files")
        matches = [source] if os.path.isfile(source) else [path for path, _ in matching(source) if os.path.isfile(path)]
        if not matches:
            raise no_such_file(source)
        found += matches
    return found


def _lines(name: str, encoding: str) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in lines(name, encoding))


def _value(record: Any, column: str, kind: Kind) -> Any:
    if kind == "messages":
        return conversation(record, column)
    if isinstance(record, str):
        record = {"text": record}
    elif isinstance(record, list):
        record = {str(place): value for place, value in enumerate(record)}
    elif not isinstance(record, Mapping):
        raise DataError(f"a row is an object with columns: this one is {type(record).__name__}")
    if column not in record and kind != "optional":
        raise MissingColumnError.among(column, record)
    value = record.get(column)
    match kind:
        case "text" | "optional":
            return _text(value, column, empty=kind == "optional")
        case "label":
            return _label(value, column)
        case "number":
            return _number(value, column)
        case "words":
            words = value.split() if isinstance(value, str) else value
            if not isinstance(words, list) or not words:
                raise DataError(f"'{column}' is not a list of words, or is empty")
            return [_label(word, column) for word in words]


def _text(value: Any, column: str, *, empty: bool = False) -> str:
    if value is not None and not isinstance(value, str):
        raise DataError(f"'{column}' holds {type(value).__name__}, not text")
    value = (value or "").strip()
    if not value and not empty:
        raise DataError(f"'{column}' is empty")
    if "\0" in value or not is_text(value):
        raise DataError(f"'{column}' holds a NUL character or a lone surrogate, which are not text")
    return value


def _label(value: Any, column: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return _text(value, column)


def _number(value: Any, column: str) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"'{column}' is empty")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"'{column}' is not a finite number: {str(value)[:40]!r}")
    return number
