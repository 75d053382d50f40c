"""Rows of tables, one by one, each with the number of its line, counted from 1 (in Parquet that of the row itself)."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

from weft.data.streams import MAX_ROW_BYTES, characters, check_unpacked, format_of, lines, seekable
from weft.errors import DataError, counted, listed
from weft.storage.untrusted import refuse_beyond

MAX_COLUMNS_READ = 1000  # in search of the one that was meant
BATCH = 256  # rows of a Parquet file that are read at once
MAX_BATCH_BYTES = 1 << 24  # of them that are made into values at once
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(NamedTuple):
    """In place of a row that cannot be read, though those after it can."""

    reason: str


class RowError(DataError):
    """A row that can't be read, though those after it may be."""


class MissingColumnError(DataError):
    """A column that a table doesn't have; whoever asked for it knows the setting that names another: its `advice`."""

    def __init__(self, line: str, column: str, advice: str = ""):
        super().__init__(f"{line}; {advice}" if advice else line)
        self.line, self.column = line, column

    @classmethod
    def among(cls, column: str, known: Iterable[str], where: str = "") -> "MissingColumnError":
        """The error that names the columns there are, the nearest one first."""
        known = [str(name) for name in islice(known, MAX_COLUMNS_READ)]
        near = get_close_matches(column, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        place = f"{where}: " if where else ""
        return cls(f"{place}no column '{column}'; {hint}its columns: {listed(known)}", column)


class SeparatorError(DataError):
    """A table whose columns are divided by something else than its suffix says."""


TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# in .csv a quoted field may hold commas and line ends; in .tsv a quotation mark is a character like any other
DIALECTS: dict[str, dict[str, Any]] = {".csv": {"strict": True}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}


def records(
    name: str, columns: Sequence[str], *, every: bool = False, encoding: str = "utf-8"
) -> Iterator[tuple[int, Any]]:
    """(number, row) of a file in one of the formats of TABLES, as the file's suffix says; '-' is JSON Lines.

    `columns` are refused where a table lacks them; those that are all whole numbers are places in a table without a
    header. `every` other column of a Parquet file is read too.
    """
    match ".jsonl" if name == "-" else format_of(name):
        case ".jsonl" | ".ndjson":
            return _json_lines(name, encoding)
        case ".json":
            return JsonText(name, encoding).rows()
        case ".csv" | ".tsv":
            return _table(name, columns, encoding)
        case _:
            return _parquet_rows(name, columns, every)


def text_of(row: Any, column: str, where: str) -> str:
    """The text of a row that is an object, or a string itself. No value is no text."""
    if isinstance(row, Malformed):
        raise DataError(f"{where}: {row.reason}")
    if isinstance(row, dict):
        if column not in row:
            raise MissingColumnError.among(column, row, where)
        row = row[column]
    if row is not None and not isinstance(row, str):
        raise DataError(f"{where}: '{column}' holds {type(row).__name__}, not text")
    return row or ""


def _json_lines(name: str, encoding: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines(name, encoding), 1):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            value = Malformed(f"is not valid JSON: {_reason(error)}")
        yield number, value


class JsonText:
    """JSON text of which the part from `at` on is still to be parsed, and more comes in as it is needed."""

    def __init__(self, name: str, encoding: str = "utf-8") -> None:
        self.name, self.more = name, characters(name, encoding)
        self.text, self.at, self.line = "", 0, 1
        self._before = 0  # characters that `text` held and holds no more

    @property
    def taken(self) -> int:
        """How many characters of the file are parsed."""
        return self._before + self.at

    def rows(self) -> Iterator[tuple[int, Any]]:
        """(line, value) of the items of a JSON list, or of values one after another."""
        listed = self._peek() == "["
        self.at += listed
        while mark := self._peek():
            if listed and mark == "]":
                self.at += 1
                if self._peek():
                    raise self._wrong("text after the end of the list")
                return
            yield self.line, self._value()
            mark = self._peek()
            if listed and mark not in (",", "]"):
                raise self._wrong("',' or ']' expected")
            self.at += listed and mark == ","
        if listed:
            raise self._wrong("the list never ends")

    def _wrong(self, reason: str) -> DataError:
        return DataError(f"{self.name}: line {self.line} is not valid JSON: {reason}")

    def _grow(self) -> bool:
        """Adds at least as much as there is, so that parsing again and again stays linear; False at the end."""
        rest = self.text[self.at :]
        pieces, wanted = [rest], max(len(rest), 1)
        while wanted > 0 and (piece := next(self.more, "")):
            pieces.append(piece)
            wanted -= len(piece)
        self._before += self.at
        self.text, self.at = "".join(pieces), 0
        return len(pieces) > 1

    def _peek(self) -> str:
        while True:
            stop = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing, too
            self.line += self.text.count("\n", self.at, stop)
            self.at = stop
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._grow():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, stop = _DECODER.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > MAX_ROW_BYTES or not self._grow():
                    raise self._wrong(_reason(error)) from None
                continue
            self.line += self.text.count("\n", self.at, stop)
            self.at = stop
            return value


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _table(name: str, columns: Sequence[str], encoding: str) -> Iterator[tuple[int, Any]]:
    """(line, values) of comma- or tab-separated fields, as many in a row as in the first. Empty lines are skipped."""
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = csv.reader(lines(name, encoding), **DIALECTS[format_of(name)])
    numbered = all(column.isdecimal() for column in columns) and len(columns) > 0
    header: list[str] | None = None
    try:
        for row in filter(None, rows):
            if header is None:
                header = [str(place) for place in range(len(row))] if numbered else row
                _check_header(header, name, columns)
                if not numbered:
                    continue
            if len(row) == len(header):
                yield rows.line_num, dict(zip(header, row, strict=True))
            elif numbered:
                yield rows.line_num, Malformed(f"does not have the {len(header)} fields of the first line")
            else:
                yield rows.line_num, Malformed(f"has {counted(len(row), 'field')}, the header has {len(header)}")
    except csv.Error as error:
        raise DataError(f"{name}: line {rows.line_num} cannot be read as a table: {error}") from None


def _check_header(header: Sequence[str], name: str, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in header:
            for separator in (";", "\t", "|", ","):
                if len(header) == 1 and separator in header[0]:
                    rule = "a .csv has commas between them, a .tsv tabs; save or rename it so"
                    raise SeparatorError(f"{name}: its columns are divided by {separator!r}; {rule}")
            raise MissingColumnError.among(column, header, name)
        if header.count(column) > 1:
            raise DataError(f"{name}: two columns are called '{column}'")


def _parquet_rows(name: str, columns: Sequence[str], every: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, values) of a Parquet file, many at once where they are small. Texts that are alike are one until then."""
    number = total = 0
    with _parquet(name) as table:
        _check_header(table.schema_arrow.names, name, columns)
        for rows in table.iter_batches(batch_size=BATCH, columns=None if every else columns):
            size = _size(rows)
            total += size
            check_unpacked(total, os.path.getsize(name), name)
            step = len(rows) if size <= MAX_BATCH_BYTES else 1
            for place in range(0, len(rows), step):
                some = rows.slice(place, step)
                if step == 1:
                    what = f"{name}: row {number + 1} has {_size(some):,} bytes"
                    refuse_beyond(_size(some), MAX_ROW_BYTES, what, kind=DataError)
                for row in some.to_pylist():
                    number += 1
                    yield number, row


def parquet_count(name: str) -> int:
    with _parquet(name) as table:
        return table.metadata.num_rows


def _size(array: Any) -> int:
    import pyarrow
    from pyarrow import compute

    if isinstance(array, pyarrow.RecordBatch):
        return sum(map(_size, array.columns))
    if isinstance(array, pyarrow.DictionaryArray):
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return 8 * len(array) + (compute.sum(lengths.cast("int64")).as_py() or 0)
    if isinstance(array, pyarrow.StructArray):
        return 8 * len(array) + sum(map(_size, array.flatten()))
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.MapArray | pyarrow.FixedSizeListArray):
        return 8 * len(array) + _size(array.flatten())
    return array.nbytes


@contextmanager
def _parquet(name: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{name}: Parquet needs pyarrow: pip install 'weft[parquet]'") from None
    try:
        with seekable(name) as stream:
            # a text that a file holds once may stand in all rows of it: they refer to the one
            columns = pyarrow.parquet.ParquetFile(stream).schema
            texts = [column.path for column in columns if column.logical_type.type == "STRING"]
            yield pyarrow.parquet.ParquetFile(stream, read_dictionary=texts)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None
