"""Read the rows of tables one by one, each with its line number, counted from 1 (in Parquet, its row number)."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

from weft.data.streams import MAX_ROW_BYTES, characters, check_decompressed, format_of, lines, open_seekable
from weft.errors import DataError, counted, listed
from weft.storage.untrusted import refuse_beyond

MAX_COLUMNS_READ = 1000  # column names compared with a missing one
BATCH = 256  # rows of a Parquet file per read
MAX_BATCH_BYTES = 1 << 24  # bytes of rows converted to Python values in one call
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(NamedTuple):
    """Yielded instead of a row that cannot be parsed, if the rows after it can."""

    reason: str


class RowError(DataError):
    """A row that can't be read; the rows after it may be readable."""


class MissingColumnError(DataError):
    """A column that a table doesn't have; `advice` names the caller's setting for another column."""

    def __init__(self, line: str, column: str, advice: str = ""):
        super().__init__(f"{line}; {advice}" if advice else line)
        self.line, self.column = line, column

    @classmethod
    def among(cls, column: str, known: Iterable[str], where: str = "") -> "MissingColumnError":
        """Return the error that suggests the nearest of the `known` columns and lists them."""
        known = [str(name) for name in islice(known, MAX_COLUMNS_READ)]
        near = get_close_matches(column, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        prefix = f"{where}: " if where else ""
        return cls(f"{prefix}no column '{column}'; {hint}its columns: {listed(known)}", column)


class SeparatorError(DataError):
    """A table whose separator is not the one that its suffix implies."""


TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# in .csv a quoted field may contain commas and line ends; in .tsv a quotation mark is an ordinary character
DIALECTS: dict[str, dict[str, Any]] = {".csv": {"strict": True}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}


def records(
    name: str, columns: Sequence[str], *, every: bool = False, encoding: str = "utf-8"
) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) of a file in one of the formats of TABLES, chosen by its suffix; '-' is JSON Lines.

    Raises MissingColumnError if a table lacks one of `columns`; if all of them are integers, they index the columns of
    a table without a header. With `every`, the other columns of a Parquet file are read too.
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
    """Text of a row, which is an object or a string; "" for null."""
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
    """Incremental JSON parser: the buffer is parsed from `offset` on, and more of the file is read when needed."""

    def __init__(self, name: str, encoding: str = "utf-8") -> None:
        self.name, self.blocks = name, characters(name, encoding)
        self.buffer, self.offset, self.line = "", 0, 1
        self._discarded = 0  # characters removed from the front of the buffer

    @property
    def consumed(self) -> int:
        """Number of characters of the file that have been parsed."""
        return self._discarded + self.offset

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (line, value) of the items of a JSON list, or of consecutive values."""
        is_list = self._peek() == "["
        self.offset += is_list
        while mark := self._peek():
            if is_list and mark == "]":
                self.offset += 1
                if self._peek():
                    raise self._error("text after the end of the list")
                return
            yield self.line, self._value()
            mark = self._peek()
            if is_list and mark not in (",", "]"):
                raise self._error("',' or ']' expected")
            self.offset += is_list and mark == ","
        if is_list:
            raise self._error("the list never ends")

    def _error(self, reason: str) -> DataError:
        return DataError(f"{self.name}: line {self.line} is not valid JSON: {reason}")

    def _grow(self) -> bool:
        """Double the unparsed buffer at least, so that repeated parsing stays linear; False at the end of the file."""
        unparsed = self.buffer[self.offset :]
        pieces, missing = [unparsed], max(len(unparsed), 1)
        while missing > 0 and (piece := next(self.blocks, "")):
            pieces.append(piece)
            missing -= len(piece)
        self._discarded += self.offset
        self.buffer, self.offset = "".join(pieces), 0
        return len(pieces) > 1

    def _peek(self) -> str:
        while True:
            self._advance(_SPACE.match(self.buffer, self.offset).end())  # type: ignore[union-attr]  # always matches
            if self.offset < len(self.buffer):
                return self.buffer[self.offset]
            if not self._grow():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.offset)
            except (ValueError, RecursionError) as error:
                if len(self.buffer) - self.offset > MAX_ROW_BYTES or not self._grow():
                    raise self._error(_reason(error)) from None
                continue
            self._advance(end)
            return value

    def _advance(self, end: int) -> None:
        self.line += self.buffer.count("\n", self.offset, end)
        self.offset = end


def _reason(error: Exception) -> str:
    return error.msg.removesuffix(" at") if isinstance(error, json.JSONDecodeError) else str(error)


def _table(name: str, columns: Sequence[str], encoding: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, values) of comma- or tab-separated fields; every row has as many as the first. Skips empty lines."""
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = csv.reader(lines(name, encoding), **DIALECTS[format_of(name)])
    numbered = all(column.isdecimal() for column in columns) and len(columns) > 0
    header: list[str] | None = None
    try:
        for row in filter(None, rows):
            if header is None:
                header = [str(index) for index in range(len(row))] if numbered else row
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
                    rule = "a .csv file needs commas, a .tsv file tabs; save or rename it accordingly"
                    raise SeparatorError(f"{name}: its columns are separated by {separator!r}; {rule}")
            raise MissingColumnError.among(column, header, name)
        if header.count(column) > 1:
            raise DataError(f"{name}: two columns are called '{column}'")


def _parquet_rows(name: str, columns: Sequence[str], every: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, values) of a Parquet file; large rows are converted to Python values one by one, because equal
    texts share their memory only until then."""
    number = total = 0
    with _parquet(name) as table:
        _check_header(table.schema_arrow.names, name, columns)
        for rows in table.iter_batches(batch_size=BATCH, columns=None if every else columns):
            size = _size(rows)
            total += size
            check_decompressed(total, os.path.getsize(name), name)
            step = len(rows) if size <= MAX_BATCH_BYTES else 1
            for start in range(0, len(rows), step):
                chunk = rows.slice(start, step)
                if step == 1:
                    what = f"{name}: row {number + 1} has {_size(chunk):,} bytes"
                    refuse_beyond(_size(chunk), MAX_ROW_BYTES, what, kind=DataError)
                for row in chunk.to_pylist():
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
        with open_seekable(name) as stream:
            # as dictionaries: a text that the file stores once for many rows is one text in memory too
            schema = pyarrow.parquet.ParquetFile(stream).schema
            texts = [column.path for column in schema if column.logical_type.type == "STRING"]
            yield pyarrow.parquet.ParquetFile(stream, read_dictionary=texts)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None
