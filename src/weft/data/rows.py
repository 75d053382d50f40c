"""Rows of text from JSON Lines, JSON, CSV, TSV and Parquet, one by one. A row without a value is None."""

import csv
import json
import re
from collections.abc import Iterator
from typing import Any

from weft.data.streams import ROW_LIMIT, characters, lines, seekable
from weft.errors import DataError

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def json_lines(name: str, column: str) -> Iterator[str | None]:
    """A JSON object (or string) a line; empty lines are passed over."""
    for number, line in enumerate(lines(name), 1):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: line {number} is not valid JSON: {_reason(error)}") from None
        yield _field(value, column, f"{name}: line {number}")


def json_values(name: str, column: str) -> Iterator[str | None]:
    """The items of a JSON list, or JSON objects one after another, parsed one by one as the file is read."""
    text = _Growing(name)
    listed = text.take("[")
    while text.peek():
        if listed and text.take("]"):
            if text.peek():
                raise DataError(f"{name}: line {text.line} is not valid JSON: text after the end of the list")
            return
        line = text.line
        yield _field(text.value(), column, f"{name}: line {line}")
        if listed and not text.take(",") and text.peek() != "]":
            raise DataError(f"{name}: line {text.line} is not valid JSON: ',' or ']' expected")
    if listed:
        raise DataError(f"{name}: line {text.line} is not valid JSON: the list never ends")


class _Growing:
    """JSON text of which the part from `at` on is still to be parsed, and more comes in as it is needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.more = characters(name)
        self.text = ""
        self.at = 0
        self.line = 1

    def grow(self) -> bool:
        """Adds at least as much as there is, so that parsing again and again stays linear; False at the end."""
        rest = self.text[self.at :]
        pieces, wanted = [rest], max(len(rest), 1)
        while wanted > 0 and (piece := next(self.more, "")):
            pieces.append(piece)
            wanted -= len(piece)
        self.text, self.at = "".join(pieces), 0
        return len(pieces) > 1

    def peek(self) -> str:
        """The next character that isn't white space, "" at the end."""
        while True:
            stop = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing, too
            self.line += self.text.count("\n", self.at, stop)
            self.at = stop
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def take(self, mark: str) -> bool:
        """Steps over `mark` if it is next."""
        found = self.peek() == mark
        self.at += found
        return found

    def value(self) -> Any:
        while True:
            try:
                value, stop = _DECODER.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > ROW_LIMIT or not self.grow():
                    raise DataError(f"{self.name}: line {self.line} is not valid JSON: {_reason(error)}") from None
                continue
            self.line += self.text.count("\n", self.at, stop)
            self.at = stop
            return value


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _field(value: Any, column: str, where: str) -> str | None:
    """The text of a row that is an object, or a string itself. No value is no text."""
    if isinstance(value, dict):
        if column not in value:
            raise DataError(f"{where} has no column '{column}'; its columns: {', '.join(value)}")
        value = value[column]
    if value is None or isinstance(value, str):
        return value
    raise DataError(f"{where}: '{column}' holds {type(value).__name__}, not text")


def csv_table(name: str, column: str) -> Iterator[str | None]:
    """Comma-separated values with a header; a quoted field may hold commas and line ends."""
    csv.field_size_limit(ROW_LIMIT)
    return _table(csv.reader(lines(name), strict=True), name, column)


def tsv_table(name: str, column: str) -> Iterator[str | None]:
    """Tab-separated values with a header. Nothing is quoted: a quotation mark is a character as any other."""
    csv.field_size_limit(ROW_LIMIT)
    return _table(csv.reader(lines(name), delimiter="\t", quoting=csv.QUOTE_NONE), name, column)


def _table(rows: Any, name: str, column: str) -> Iterator[str | None]:
    try:
        header: list[str] = next(rows, [])
        if header and column not in header:
            raise DataError(f"{name}: has no column '{column}'; its columns: {', '.join(header)}")
        for row in rows:
            if row and len(row) != len(header):
                raise DataError(f"{name}: line {rows.line_num} has {len(row)} fields, the header has {len(header)}")
            if row:
                yield row[header.index(column)]
    except csv.Error as error:
        raise DataError(f"{name}: line {rows.line_num} cannot be read as a table: {error}") from None


def parquet(name: str, column: str) -> Iterator[str | None]:
    """A column of a Parquet file, a few rows at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{name}: Parquet needs pyarrow: pip install 'weft[parquet]'") from None
    try:
        with seekable(name) as stream:
            table = pyarrow.parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            if column not in names:
                raise DataError(f"{name}: has no column '{column}'; its columns: {', '.join(names)}")
            for rows in table.iter_batches(batch_size=256, columns=[column]):
                for value in rows.column(0).to_pylist():
                    yield _field(value, column, f"{name}: a row")
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None
