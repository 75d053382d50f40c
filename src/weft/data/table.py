"""Rows with named columns, for tasks: from tables, JSON, parallel text files and built-in tasks, each checked.

A row that cannot be used stops the reading with one line that names its file and line, or is counted and left out.
A file that is damaged, or lacks a column altogether, stops it either way.
"""

import glob
import hashlib
import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, Literal

from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit
from weft.data.documents import files
from weft.data.messages import conversation
from weft.data.rows import Malformed, csv_rows, json_line_rows, json_rows, missing, parquet_rows, tsv_rows
from weft.data.shards import Side
from weft.data.streams import PACKED, lines
from weft.errors import DataError, suggestion
from weft.files import is_text

# text: some text; optional: text, or nothing; label: a name, or a whole number; score: a number; words: a list of
# words, or text that white space cuts into them; messages: a conversation, made from the row as a whole
Kind = Literal["text", "optional", "label", "score", "words", "messages"]
Columns = Sequence[str] | Mapping[str, Kind]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True)
class Row:
    """The wanted columns of a row, and where it stands: `file.tsv:17`."""

    values: dict[str, Any]
    where: str


@dataclass
class Skipped:
    """How many rows were left out, and why. A reason is what an error says up to its first colon or semicolon."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # where each reason was met first

    def add(self, reason: str, where: str) -> None:
        short = re.split(r"[:;] ", reason, maxsplit=1)[0]
        self.counts[short] = self.counts.get(short, 0) + 1
        self.first.setdefault(short, where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        if not self.counts:
            return "no row was left out"
        reasons = sorted(self.counts, key=lambda reason: -self.counts[reason])
        parts = [f"{self.counts[reason]} × {reason} (first: {self.first[reason]})" for reason in reasons]
        return f"{self.total} {'row was' if self.total == 1 else 'rows were'} left out: {', '.join(parts)}"


def read_rows(
    sources: Sequence[str],
    columns: Columns,
    *,
    targets: Sequence[str] = (),
    side: Side = "train",
    on_error: OnError = "stop",
    skipped: Skipped | None = None,
) -> Iterator[Row]:
    """The rows of all sources, in order. A sequence of columns means that each holds text.

    Columns that are all whole numbers are places, from 0, in a table without a header. With `targets` the sources are
    text files, and line i of each belongs to line i of its target: the columns `source` and `target`. A text file alone
    has a row a line, in the column `text`. `builtin:NAME` is a built-in task, of which `side` chooses the items.
    """
    kinds = _kinds(columns)
    skipped = Skipped() if skipped is None else skipped
    before = skipped.total
    found = False
    for where, record in _parallel(sources, targets) if targets else _records(sources, kinds, side):
        try:
            if isinstance(record, Malformed):
                raise DataError(record.reason)
            values = {name: _value(record, name, kind) for name, kind in kinds.items()}
        except DataError as error:
            if on_error == "stop":
                raise DataError(f"{where}: {error}") from None
            skipped.add(str(error), where)
            continue
        found = True
        yield Row(values, where)
    if not found:
        named = ", ".join(sources) or "no source given"
        raise DataError(f"{named}: no row at all" + (f"; {skipped}" if skipped.total > before else ""))


def _kinds(columns: Columns) -> dict[str, Kind]:
    assert columns, "no column is wanted"
    return dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "text")


# ---- records: a mapping for each row of a file


def _records(sources: Sequence[str], kinds: Mapping[str, Kind], side: Side) -> Iterator[tuple[str, Any]]:
    for name in files(sources):
        for number, record in _file(name, kinds, side):
            yield f"{name}:{number}", record


def _file(name: str, kinds: Mapping[str, Kind], side: Side) -> Iterator[tuple[int, Any]]:
    if name.startswith("hub:"):
        raise DataError(f"{name.removeprefix('hub:')}: no such file; rows of a hub dataset are read from a copy of it")
    if name.startswith("builtin:"):
        return enumerate(_builtin(name.removeprefix("builtin:"), side), 1)
    match ".jsonl" if name == "-" else _format(name):
        case ".jsonl" | ".ndjson":
            return json_line_rows(name)
        case ".json":
            return json_rows(name)
        case ".csv":
            return _table(csv_rows(name), name, kinds)
        case ".tsv":
            return _table(tsv_rows(name), name, kinds)
        case ".parquet":
            every = any(kind in ("optional", "messages") for kind in kinds.values())
            return parquet_rows(name, None if every else list(kinds))
        case _:
            return ((number, {"text": line}) for number, line in enumerate(_lines(name), 1))


def _format(name: str) -> str:
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


def _table(
    rows: Iterator[tuple[int, list[str] | Malformed]], name: str, kinds: Mapping[str, Kind]
) -> Iterator[tuple[int, Any]]:
    header: list[str] | None = None
    numbered = all(column.isdecimal() for column in kinds)
    for number, row in rows:
        if isinstance(row, Malformed):
            yield number, Malformed(f"has not the {len(header or ())} fields of the first line") if numbered else row
        elif header is None:
            header = [str(place) for place in range(len(row))] if numbered else row
            if len(set(header)) < len(header):
                twice = next(column for column in header if header.count(column) > 1)
                raise DataError(f"{name}: two columns are called '{twice}'")
            for column, kind in kinds.items():
                if column not in header and kind not in ("optional", "messages"):
                    raise DataError(f"{name}: {missing(column, header)}")
            if numbered:
                yield number, dict(zip(header, row, strict=True))
        else:
            yield number, dict(zip(header, row, strict=True))


def _builtin(name: str, side: Side) -> Iterator[Mapping[str, Any]]:
    from weft.text import builtin

    if name in builtin.builtin_names():
        return ({"text": text} for text in builtin.documents(name))
    if _is_task(f"builtin:{name}"):
        from weft.text import tasks

        return iter(tasks.rows(name, side))
    raise DataError(f"builtin:{name}: no such task or corpus; {suggestion(name, _builtin_names())}")


def _builtin_names() -> list[str]:
    from weft.text import builtin, tasks

    return [*tasks.names(), *builtin.builtin_names()]


def _is_task(source: str) -> bool:
    if not source.startswith("builtin:"):
        return False
    from weft.text import tasks

    return source.removeprefix("builtin:") in tasks.names()


def _parallel(sources: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[str, Any]]:
    left, right = _text_files(sources), _text_files(targets)
    if len(left) != len(right):
        raise DataError(
            f"{len(left)} source files and {len(right)} target files ({', '.join([*left[:2], *right[:2]])} …): "
            "each source needs its target"
        )
    for name, other in zip(left, right, strict=True):
        counts = [0, 0]
        for source, target in zip_longest(_lines(name), _lines(other)):
            counts[0] += source is not None
            counts[1] += target is not None
            if source is not None and target is not None:
                yield f"{name}:{counts[0]}, {other}:{counts[1]}", {"source": source, "target": target}
        if counts[0] != counts[1]:
            raise DataError(
                f"{name} has {counts[0]} lines, {other} has {counts[1]}: line i of one belongs to line i of the other"
            )


def _text_files(sources: Sequence[str]) -> list[str]:
    """Text files whatever their suffix is: parallel ones are called after their languages."""
    found: list[str] = []
    for source in sources:
        if _format(source) in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"):
            raise DataError(f"{source}: a table holds both sides in its columns; leave the target files out")
        if os.path.isfile(source):
            found.append(source)
        elif matches := sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path)):
            found += matches
        else:
            folder = os.path.dirname(source)
            near = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
            raise DataError(f"{source}: no such file; {suggestion(source, [os.path.join(folder, n) for n in near])}")
    return found


def _lines(name: str) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in lines(name))


# ---- values: each column as its kind wants it


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
        raise DataError(missing(column, record))
    value = record.get(column)
    match kind:
        case "text":
            return _text(value, column, empty=False)
        case "optional":
            return _text("" if value is None else value, column, empty=True)
        case "label":
            return _label(value, column)
        case "score":
            return _score(value, column)
        case "words":
            words = value.split() if isinstance(value, str) else value
            if not isinstance(words, list) or not words:
                raise DataError(f"'{column}' is no list of words, or an empty one")
            return [_label(word, column) for word in words]


def _text(value: Any, column: str, *, empty: bool) -> str:
    """Text without the white space around it, which no task is about."""
    if value is None:
        raise DataError(f"'{column}' is empty")
    if not isinstance(value, str):
        raise DataError(f"'{column}' holds {type(value).__name__}, not text")
    if "\0" in value or not is_text(value):
        raise DataError(f"'{column}' holds a NUL character or a lone surrogate, which is no text")
    value = value.strip()
    if not value and not empty:
        raise DataError(f"'{column}' is empty")
    return value


def _label(value: Any, column: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return _text(value, column, empty=False)


def _score(value: Any, column: str) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"'{column}' is empty")
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"'{column}' is no finite number: {str(value)[:40]!r}")
    return score


# ---- training and validation


def split_rows(
    sources: Sequence[str],
    columns: Columns,
    split: Split,
    *,
    targets: Sequence[str] = (),
    key: Sequence[str] | None = None,
    on_error: OnError = "stop",
    skipped: Skipped | None = None,
) -> Iterator[tuple[Side, Row]]:
    """Every row with its side, in reading order; with `files` the validation rows come last.

    `hash` looks at the columns of `key` alone: all that are asked about, unless given, neither labels nor scores nor
    `target`, so that no question stands on both sides. Built-in tasks hold out items by themselves, after the rest.
    """
    kinds = _kinds(columns)
    skipped = Skipped() if skipped is None else skipped

    def read(names: Sequence[str], others: Sequence[str], side: Side, counted: Skipped = skipped) -> Iterator[Row]:
        return read_rows(names, kinds, targets=others, side=side, on_error=on_error, skipped=counted)

    held = [] if targets or isinstance(split, NoSplit | FilesSplit) else [s for s in sources if _is_task(s)]
    plain = [source for source in sources if source not in held]
    parts: list[Iterator[tuple[Side, Row]]] = []
    if plain or not held:
        rows = read(plain, targets, "train")
        if isinstance(split, HashSplit):
            parts.append(_by_hash(rows, key or _asked(kinds), split.fraction))
        elif isinstance(split, TailSplit):
            parts.append(_by_place(rows, read(plain, targets, "train", Skipped()), plain, split))
        else:
            parts.append(_all(rows, "train"))
    if held:
        parts += [_all(read(held, (), "train"), "train"), _all(read(held, (), "validation"), "validation")]
    if isinstance(split, FilesSplit):
        parts.append(_all(read(split.sources, split.targets, "validation"), "validation"))

    counts: dict[Side, int] = {"train": 0, "validation": 0}
    for side, row in chain.from_iterable(parts):
        counts[side] += 1
        yield side, row
    empty = min((side for side, count in counts.items() if not count), default=None)
    if empty is not None and not isinstance(split, NoSplit):
        raise DataError(
            f"{sum(counts.values())} rows leave none for {empty} (validation.kind = '{split.kind}'); "
            "add rows, change validation.fraction, or set validation.kind to none"
        )


def _asked(kinds: Mapping[str, Kind]) -> list[str]:
    asked = [name for name, kind in kinds.items() if kind not in ("label", "score") and name != "target"]
    return asked or list(kinds)


def _all(rows: Iterable[Row], side: Side) -> Iterator[tuple[Side, Row]]:
    return ((side, row) for row in rows)


def _by_hash(rows: Iterable[Row], key: Sequence[str], fraction: float) -> Iterator[tuple[Side, Row]]:
    for row in rows:
        text = json.dumps([row.values[name] for name in key], ensure_ascii=False, sort_keys=True)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        yield "validation" if int.from_bytes(digest, "big") < fraction * 2**64 else "train", row


def _by_place(
    rows: Iterable[Row], again: Iterable[Row], sources: Sequence[str], split: TailSplit
) -> Iterator[tuple[Side, Row]]:
    """The rows are read once more just to be measured."""
    if "-" in sources:
        raise DataError("'-': validation.kind = 'tail' reads the rows twice, which standard input can't; name a file")
    tail = _tail(array("q", (_size(row) for row in again)), split)
    for number, row in enumerate(rows):
        yield "train" if number < tail else "validation", row


def _size(row: Row) -> int:
    return sum(len(str(value).encode("utf-8", "surrogatepass")) for value in row.values.values())


def _tail(sizes: "array[int]", split: TailSplit) -> int:
    """How many rows come before the tail: the last `fraction` of rows, or the last rows that hold `bytes` of text."""
    if split.bytes is None:
        return len(sizes) - round(len(sizes) * split.fraction)
    if split.bytes >= sum(sizes):
        raise DataError(f"validation.bytes = {split.bytes}: the rows have {sum(sizes)} bytes; hold out fewer")
    held, row = 0, len(sizes)
    while held < split.bytes:
        row -= 1
        held += sizes[row]
    return row
