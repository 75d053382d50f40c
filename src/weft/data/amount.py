"""How much text there is, from the files' sizes and a look at their beginnings: a matter of milliseconds.

A plain file is as long as its text. What a packed file or a table holds is estimated from its beginning, unless that is
all of it.
"""

import csv
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zstandard

from weft.data.rows import DIALECTS, TABLES, JsonText, parquet_count, records
from weft.data.sources import files, hub_sizes
from weft.data.streams import PACKED, format_of, is_utf8, lines, unpacked
from weft.errors import DataError
from weft.storage.files import utf8_size
from weft.text import builtin

SAMPLE = 256 * 1024  # bytes of a table that are looked at
HEAD = 1024 * 1024  # bytes that are unpacked of a packed file
AHEAD = 64 * 1024
ROWS = 200  # rows of a built-in task, or of a Parquet file, that are looked at
UNPACKED = 3.0  # times as large, where nothing better is known


@dataclass(frozen=True)
class Amount:
    """UTF-8 bytes of text; an estimate unless `exact`."""

    bytes: int
    exact: bool = True

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.exact and other.exact)


def amount(sources: Sequence[str], columns: Sequence[str] = ("text",), encoding: str = "utf-8") -> Amount:
    """The text of all sources; of tables, that in `columns`. Standard input ('-'), of unknown size, counts as 0."""
    return sum((_file(name, columns, encoding) for name in files(sources)), start=Amount(0))


def _file(name: str, columns: Sequence[str], encoding: str) -> Amount:
    if name == "-":
        return Amount(0, exact=False)
    if name.startswith("hub:"):
        return Amount(round(sum(size * _unpacking(file) for file, size in hub_sizes(name))), exact=False)
    if name in builtin.TASK_SOURCES:
        task = name.removeprefix("builtin:")
        drawn = list(islice(builtin.task_rows(task, "train"), ROWS))
        return Amount(_text(drawn, columns) * builtin.TASKS[task].train // len(drawn), exact=False)
    if name.startswith("builtin:"):
        return Amount(sum(map(utf8_size, builtin.corpus(name).documents)))
    try:
        return _estimated(name, columns, encoding)
    except (OSError, csv.Error, zstandard.ZstdError, ValueError, RecursionError):
        # damage, or a column that is missing: reading the file says so, and where
        return Amount(round(_size(name) * _unpacking(name)), exact=False)


def _size(name: str) -> int:
    try:
        return os.path.getsize(name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from None


def _unpacking(name: str) -> float:
    return UNPACKED if name.lower().endswith((*PACKED, ".parquet")) else 1.0


def _estimated(name: str, columns: Sequence[str], encoding: str) -> Amount:
    kind = format_of(name)
    if kind == ".parquet" and name.lower().endswith(PACKED):  # it would have to be unpacked as a whole
        return Amount(round(_size(name) * UNPACKED * UNPACKED), exact=False)
    if kind == ".parquet":
        sample = [row for _, row in islice(records(name, (), every=True), ROWS)]
        count = parquet_count(name)
        return Amount(_text(sample, columns) * count // max(1, len(sample)), exact=count == len(sample))
    size, exact = _unpacked_size(name)
    if kind not in TABLES:
        return Amount(size, exact and is_utf8(encoding))
    if kind == ".json":
        parsed, rows, whole = JsonText(name, encoding), [], True
        for _, value in parsed.rows():
            rows.append(value)
            if parsed.taken >= SAMPLE:
                whole = False
                break
        read = parsed.taken
    else:
        rows, read, whole = _lines(name, columns, encoding)
    text = _text(rows, columns)
    return Amount(text) if whole else Amount(size * text // read, exact=False)


def _unpacked_size(name: str) -> tuple[int, bool]:
    """The bytes of a file once it is unpacked, without a byte order mark; and whether that is certain."""
    size, given, whole = _size(name), 0, True
    with open(name, "rb") as stream:
        if not name.lower().endswith(PACKED):
            return size - 3 * (stream.read(3) == b"\xef\xbb\xbf"), True
        for block in unpacked(stream, name):
            given += len(block)
            # a library reads some kibibytes ahead, which is much where little holds a lot
            if given >= HEAD and (stream.tell() >= AHEAD or given >= 16 * HEAD):
                whole = False
                break
        if whole:
            return given, True
        likely = size * given // stream.tell()
        # what the file itself notes; of a gzip the last 32 bits of the size, of either that of one frame alone
        if name.lower().endswith(".gz"):
            stream.seek(-4, os.SEEK_END)
            (low,) = struct.unpack("<I", stream.read(4))
            noted = low + max(0, round((likely - low) / 2**32)) * 2**32
        else:
            stream.seek(0)
            noted = zstandard.frame_content_size(stream.read(18))
    return (noted if abs(noted - likely) < likely / 2 else likely), False


def _lines(name: str, columns: Sequence[str], encoding: str) -> tuple[list[Any], int, bool]:
    """A table's first rows, how much was read for them, and whether that was all."""
    taken: list[str] = []
    size, whole, kind = 0, True, format_of(name)
    for line in lines(name, encoding):
        if size >= SAMPLE:
            whole = False
            break
        taken.append(line)
        size += utf8_size(line)
    if kind not in DIALECTS:
        return [json.loads(line) for line in taken if not line.isspace()], size, whole
    # the last row may be cut inside a quoted field
    fields = [row for row in csv.reader(taken, **DIALECTS[kind] | {"strict": False}) if row]
    first = fields[0] if fields else []
    numbered = all(column.isdecimal() for column in columns)
    header = [str(place) for place in range(len(first))] if numbered else first
    return [dict(zip(header, row, strict=False)) for row in fields[not numbered :]], size, whole


def _text(rows: Iterable[Any], columns: Sequence[str]) -> int:
    """Bytes of text in these columns of rows; in all where none of them is there."""
    total = 0
    for row in rows:
        wanted = [row[column] for column in columns if column in row] if isinstance(row, dict) else []
        total += sum(map(_inside, wanted or [row]))
    return total


def _inside(value: Any) -> int:
    if isinstance(value, str):
        return utf8_size(value)
    if isinstance(value, dict):
        return sum(map(_inside, value.values()))
    return sum(map(_inside, value)) if isinstance(value, list) else 0
