"""Estimate the amount of text in some sources within milliseconds, from file sizes and the first bytes of each file.

The text of a plain file is as long as the file. The text of a compressed file or a table is estimated from its first
bytes, and exact if these are the whole file.
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
from weft.data.sources import find_files, hub_sizes
from weft.data.streams import COMPRESSED, decompress, format_of, is_utf8, lines
from weft.errors import os_errors
from weft.storage.files import utf8_size
from weft.text import builtin

SAMPLE = 256 * 1024  # bytes of a table to read
HEAD = 1024 * 1024  # bytes of text to decompress
MIN_COMPRESSED = 64 * 1024  # compressed bytes to read for an estimate: the library reads several KiB ahead
ROWS = 200  # rows of a built-in task or of a Parquet file to read
RATIO = 3.0  # assumed size of the text relative to the compressed file


@dataclass(frozen=True)
class Amount:
    """Number of UTF-8 bytes of text; an estimate unless `exact`."""

    bytes: int
    exact: bool = True

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.exact and other.exact)


def amount(sources: Sequence[str], columns: Sequence[str] = ("text",), encoding: str = "utf-8") -> Amount:
    """Amount of text in all sources; in tables, only that of `columns`. Standard input ('-') counts as 0, inexact."""
    return sum((_amount_of(name, columns, encoding) for name in find_files(sources)), start=Amount(0))


def _amount_of(name: str, columns: Sequence[str], encoding: str) -> Amount:
    if name == "-":
        return Amount(0, exact=False)
    if name.startswith("hub:"):
        return Amount(round(sum(size * _ratio(file) for file, size in hub_sizes(name))), exact=False)
    if name in builtin.TASK_SOURCES:
        task = name.removeprefix("builtin:")
        sample = list(islice(builtin.task_rows(task, "train"), ROWS))
        return Amount(_text_size(sample, columns) * builtin.TASKS[task].train // len(sample), exact=False)
    if name.startswith("builtin:"):
        return Amount(sum(map(utf8_size, builtin.corpus(name).documents)))
    try:
        return _estimate(name, columns, encoding)
    except (OSError, csv.Error, zstandard.ZstdError, ValueError, RecursionError):
        # damage or a missing column: reading the file will report it, with the line
        return Amount(round(_size(name) * _ratio(name)), exact=False)


def _size(name: str) -> int:
    with os_errors(name):
        return os.path.getsize(name)


def _ratio(name: str) -> float:
    return RATIO if name.lower().endswith((*COMPRESSED, ".parquet")) else 1.0


def _estimate(name: str, columns: Sequence[str], encoding: str) -> Amount:
    kind = format_of(name)
    if kind == ".parquet" and name.lower().endswith(COMPRESSED):  # the whole file would have to be decompressed
        return Amount(round(_size(name) * RATIO * RATIO), exact=False)
    if kind == ".parquet":
        sample = [row for _, row in islice(records(name, (), every=True), ROWS)]
        count = parquet_count(name)
        return Amount(_text_size(sample, columns) * count // max(1, len(sample)), exact=count == len(sample))
    size, exact = _decompressed_size(name)
    if kind not in TABLES:
        return Amount(size, exact and is_utf8(encoding))
    if kind == ".json":
        parsed, rows, complete = JsonText(name, encoding), [], True
        for _, value in parsed.rows():
            rows.append(value)
            if parsed.consumed >= SAMPLE:
                complete = False
                break
        read = parsed.consumed
    else:
        rows, read, complete = _first_rows(name, columns, encoding)
    text = _text_size(rows, columns)
    return Amount(text) if complete else Amount(size * text // read, exact=False)


def _decompressed_size(name: str) -> tuple[int, bool]:
    """Size of a decompressed file without a byte order mark, and whether it is exact."""
    size, total = _size(name), 0
    with open(name, "rb") as stream:
        if not name.lower().endswith(COMPRESSED):
            return size - 3 * (stream.read(3) == b"\xef\xbb\xbf"), True
        for block in decompress(stream, name):
            total += len(block)
            if total >= HEAD and (stream.tell() >= MIN_COMPRESSED or total >= 16 * HEAD):
                break
        else:
            return total, True
        estimate = size * total // stream.tell()
        # sizes recorded in the file are of one frame only, and gzip records 32 bits: used if they are plausible
        if name.lower().endswith(".gz"):
            stream.seek(-4, os.SEEK_END)
            (low,) = struct.unpack("<I", stream.read(4))
            recorded = low + max(0, round((estimate - low) / 2**32)) * 2**32
        else:
            stream.seek(0)
            recorded = zstandard.frame_content_size(stream.read(18))
    return (recorded if abs(recorded - estimate) < estimate / 2 else estimate), False


def _first_rows(name: str, columns: Sequence[str], encoding: str) -> tuple[list[Any], int, bool]:
    """First rows of a table, the number of bytes they take, and whether they are all rows."""
    head: list[str] = []
    size, complete, kind = 0, True, format_of(name)
    for line in lines(name, encoding):
        if size >= SAMPLE:
            complete = False
            break
        head.append(line)
        size += utf8_size(line)
    if kind not in DIALECTS:
        return [json.loads(line) for line in head if not line.isspace()], size, complete
    # not strict: the last row may be cut inside a quoted field
    fields = [row for row in csv.reader(head, **DIALECTS[kind] | {"strict": False}) if row]
    first = fields[0] if fields else []
    numbered = all(column.isdecimal() for column in columns)
    header = [str(index) for index in range(len(first))] if numbered else first
    return [dict(zip(header, row, strict=False)) for row in fields[not numbered :]], size, complete


def _text_size(rows: Iterable[Any], columns: Sequence[str]) -> int:
    """Bytes of text in these columns; in a row that has none of them, the bytes of all its text."""
    total = 0
    for row in rows:
        values = [row[column] for column in columns if column in row] if isinstance(row, dict) else []
        total += sum(map(_value_size, values or [row]))
    return total


def _value_size(value: Any) -> int:
    if isinstance(value, str):
        return utf8_size(value)
    if isinstance(value, dict):
        return sum(map(_value_size, value.values()))
    return sum(map(_value_size, value)) if isinstance(value, list) else 0
