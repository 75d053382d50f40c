"""Examples on disk: ragged fields of token ids and single numbers, memory-mapped from one safetensors file.

A field of ids is two tensors: `NAME.ids`, all examples one after another (uint16 where every id fits, else int32), and
`NAME.offsets` (int64, one more than examples), where each begins. A field of numbers is one tensor, `NAME.values`. The
header's metadata holds the format, the count, notes (the tokenizer's fingerprint, the labels' names) and a checksum.
"""

import hashlib
import json
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from pydantic import Field

from weft.config import Config, validate
from weft.data.shards import BLOCK, Array, HashedStream, Side, mapped, verify
from weft.data.table import Row
from weft.errors import ConfigError, DataError
from weft.storage import files
from weft.storage.files import replacing
from weft.storage.safetensors_header import Header, read_header

Example = Mapping[str, Sequence[int] | int | float]
CHUNK = 1024  # rows that are encoded together
UNKNOWN = "0" * 64  # in place of the checksum while it is computed
_CODES = {"U16": "<u2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in _CODES.items()}


class Metadata(Config):
    """The header's metadata, all of it text as safetensors wants it."""

    format: Literal["weft examples"] = "weft examples"
    version: Literal["1"] = "1"
    count: str = Field(pattern=r"^\d+$")
    notes: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples by number: fields of ids, one ragged row an example, and fields of one number an example."""

    _count: int
    _ids: Mapping[str, tuple[Array, Array]]  # for each field all ids (n,) and offsets (count + 1,)
    _values: Mapping[str, Array]  # for each field (count,)
    notes: dict[str, Any]
    fingerprint: str

    @classmethod
    def open(cls, path: Path) -> "Examples":
        """A file that `write_sides` wrote. Its header, size and offsets are checked."""
        header, metadata = _header(path)
        tensors = {name: mapped(path, TYPES[at.dtype], at.shape, at.begin) for name, at in header.tensors.items()}
        count = int(metadata.count)
        values = {key.removesuffix(".values"): tensor for key, tensor in tensors.items() if key.endswith(".values")}
        fields = [key.removesuffix(".offsets") for key in tensors if key.endswith(".offsets")]
        ids = {field: (tensors.get(f"{field}.ids", np.empty(0)), tensors[f"{field}.offsets"]) for field in fields}
        whole = all(len(column) == count for column in values.values()) and len(values) + 2 * len(ids) == len(tensors)
        for flat, offsets in ids.values():
            whole = whole and len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(flat)
            whole = whole and bool((np.diff(offsets) >= 0).all())
        if not whole:
            raise DataError(f"{path}: damaged: its fields don't fit together")
        try:
            notes = json.loads(metadata.notes)
        except ValueError:
            raise DataError(f"{path}: damaged: its notes are not JSON") from None
        fingerprint = hashlib.sha256(json.dumps(json.loads(header.text), sort_keys=True).encode()).hexdigest()
        return cls(count, ids, values, notes, fingerprint)

    def __len__(self) -> int:
        return self._count

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self._ids, *self._values)

    def ids(self, field: str, number: int) -> Array:
        """The ids of an example, a copy: (length,) int64."""
        assert 0 <= number < self._count, f"example {number} of {self._count}"
        ids, offsets = self._field(field)
        return ids[int(offsets[number]) : int(offsets[number + 1])].astype(np.int64)

    def joined(self, field: str) -> Array:
        """The ids of all examples, one after another, as they are on disk: (n,) uint16 or int32, not to be changed."""
        return self._field(field)[0]

    def lengths(self, field: str) -> Array:
        """How many ids each example has: (count,)."""
        return np.diff(self._field(field)[1])

    def values(self, field: str) -> Array:
        """The number of each example: (count,) int64, or float64 where one was no whole number."""
        assert field in self._values, f"no field of numbers '{field}'; there are {self.fields}"
        return self._values[field]

    def _field(self, field: str) -> tuple[Array, Array]:
        assert field in self._ids, f"no field of ids '{field}'; there are {self.fields}"
        return self._ids[field]


def label_names(labels: Iterable[str]) -> list[str]:
    """All labels once, in an order that doesn't depend on theirs: as numbers if all are, else as text."""
    names = set(labels)
    return sorted(names, key=int) if all(name.lstrip("-").isdecimal() for name in names) else sorted(names)


class Labels:
    """Labels of one column. With `names` they are numbered in that order, and others are refused.

    Without, a label gets a number at first sight, and its final one, its place in `label_names`, once all rows were
    seen: `write_sides` puts that in its place. Labels that validation rows alone have are refused then.
    """

    def __init__(self, column: str, names: Sequence[str] | None = None) -> None:
        self.column = column
        self._given = None if names is None else list(names)
        self._numbers = {name: number for number, name in enumerate(names or ())}
        self._untaught: dict[str, str] = {}  # labels that no training row had so far, and where each was met first

    def number(self, label: str, row: Row) -> int:
        """The provisional number of a label of this row."""
        if label not in self._numbers:
            if self._given is not None:
                raise self._unknown(label, row.where)
            self._numbers[label] = len(self._numbers)
            self._untaught[label] = row.where
        if self._untaught and row.side == "train":
            self._untaught.pop(label, None)
        return self._numbers[label]

    @property
    def names(self) -> list[str]:
        """All labels in their final order, once the rows were seen."""
        for label, where in self._untaught.items():
            raise self._unknown(label, where)
        return label_names(self._numbers) if self._given is None else self._given

    @property
    def order(self) -> Array:
        """For each number that `number` gave, the final one: (labels,)."""
        final = {name: place for place, name in enumerate(self.names)}
        return np.array([final[name] for name in self._numbers], dtype=np.int64)

    def _unknown(self, label: str, where: str) -> DataError:
        known = self._given if self._given is not None else label_names(set(self._numbers) - set(self._untaught))
        shown = ", ".join(known[:12])
        return DataError(f"{where}: '{self.column}' is {label!r}, which no training row has; known: {shown}")


def encode_rows(
    rows: Iterable[Row], make: Callable[[Sequence[Row]], Iterable[Example]]
) -> Iterator[tuple[Side, Example]]:
    """The example that `make` gives for each row, with the row's side, as `write_sides` takes them. `make` gets many
    rows at a time, because tokenizers are faster that way."""
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        yield from zip((row.side for row in chunk), make(chunk), strict=True)


def write_sides(
    paths: Mapping[Side, Path],
    examples: Iterable[tuple[Side, Example]],
    *,
    notes: Mapping[str, Any] | None = None,
    labels: Mapping[str, Labels] | None = None,
) -> dict[Side, Examples]:
    """Writes the examples of each side to a file of its own, in one pass, and opens them; other sides are skipped.

    Every example of a side has the same fields: a sequence of whole numbers is a field of ids, a number a field of
    numbers. What is held in memory is a few bytes an example. `notes` is anything that JSON can hold. Fields of
    `labels` hold the numbers that those gave, and get the final ones; negative numbers stay.
    """
    try:
        with ExitStack() as stack:
            for path in paths.values():
                path.parent.mkdir(parents=True, exist_ok=True)
            writers = {side: _Writer(path.parent, stack) for side, path in paths.items()}
            for side, example in examples:
                if side in writers:
                    writers[side].add(example)
            for side, writer in writers.items():
                if not writer.count:
                    raise DataError(f"{paths[side]}: there is no example to write")
                orders = {field: own.order for field, own in (labels or {}).items()}
                writer.write(stack.enter_context(replacing(paths[side])), notes or {}, orders)
            # in their places at last, both
    except OSError as error:
        place = error.filename or next(iter(paths.values()))
        raise DataError(f"{place}: cannot be written: {error.strerror or error}") from None
    return {side: Examples.open(path) for side, path in paths.items()}


class _Writer:
    """The examples of one file. Ids wait in files without a name until their number is known."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.count = 0
        self._folder, self._files = folder, files
        self._spills: dict[str, _Spill] = {}
        self._values: dict[str, list[int | float]] = {}

    def add(self, row: Example) -> None:
        if self.count == 0:
            for key, value in row.items():
                if isinstance(value, Real):
                    self._values[key] = []
                else:
                    file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # it is closed with the others
                    self._spills[key] = _Spill(self._files.enter_context(file))
        assert row.keys() == {*self._spills, *self._values}, f"example {self.count} has the fields {[*row]}"
        for key, spill in self._spills.items():
            spill.add(row[key])
        for key, column in self._values.items():
            column.append(row[key])  # type: ignore[arg-type]  # a number, as in the first row
        self.count += 1

    def write(self, stream: IO[bytes], notes: Mapping[str, Any], orders: Mapping[str, Array]) -> None:
        # the widest numbers first: every tensor then begins at a multiple of its width
        tensors: list[tuple[str, str, int, Iterable[bytes]]] = []
        for key, spill in self._spills.items():
            tensors.append((f"{key}.offsets", "I64", self.count + 1, [np.array(spill.offsets, dtype="<i8").tobytes()]))
        for key, column in self._values.items():
            dtype = "I64" if all(isinstance(value, Integral) for value in column) else "F64"
            numbers = _reordered(np.array(column, dtype=TYPES[dtype]), orders.get(key))
            tensors.append((f"{key}.values", dtype, self.count, [numbers.tobytes()]))
        for key, spill in sorted(self._spills.items(), key=lambda item: item[1].dtype):
            tensors.append((f"{key}.ids", spill.dtype, spill.offsets[-1], spill.blocks(orders.get(key))))

        text = json.dumps(notes, ensure_ascii=False, sort_keys=True)
        metadata = Metadata(count=str(self.count), notes=text, sha256=UNKNOWN).model_dump()
        header: dict[str, Any] = {"__metadata__": metadata}
        stop = 0
        for name, dtype, size, _ in tensors:
            start, stop = stop, stop + size * TYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [start, stop]}
        hashed = HashedStream(stream)
        hashed.write(_header_bytes(header))
        for *_, blocks in tensors:
            for block in blocks:
                hashed.write(block)
        metadata["sha256"] = hashed.sha256  # as long as what stood there
        stream.seek(0)
        stream.write(_header_bytes(header))


class _Spill:
    """The ids of one field on their way to the file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.offsets = array("q", [0])
        self.low = self.high = 0

    def add(self, ids: Any) -> None:
        row = np.asarray(ids, dtype=np.int64)
        assert row.ndim == 1
        if row.size:
            self.low, self.high = min(self.low, int(row.min())), max(self.high, int(row.max()))
        assert self.low >= -(2**31) and self.high < 2**31, f"ids from {self.low} to {self.high}: not 32-bit numbers"
        self.stream.write(row.astype("<i4").tobytes())
        self.offsets.append(self.offsets[-1] + len(row))

    @property
    def dtype(self) -> str:
        return "U16" if self.low >= 0 and self.high < 1 << 16 else "I32"

    def blocks(self, order: Array | None) -> Iterator[bytes]:
        self.stream.seek(0)
        for block in iter(lambda: self.stream.read(BLOCK), b""):
            yield _reordered(np.frombuffer(block, "<i4"), order).astype(TYPES[self.dtype]).tobytes()


def _reordered(numbers: Array, order: Array | None) -> Array:
    if order is None:
        return numbers
    return np.where(numbers < 0, numbers, order[np.maximum(numbers, 0)]).astype(numbers.dtype)


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def verify_files(paths: Sequence[Path]) -> None:
    """Refuse files of examples, all in one folder, that are not what was written: each is read, once."""
    verify(paths[0].parent, {path.name: _header(path)[1].sha256 for path in paths}, _hashed)


def _hashed(path: Path) -> Iterator[bytes]:
    """What a file's checksum is of: its bytes, with zeros in the place of the checksum."""
    with files.open_regular(path) as file:
        begin = file.read(8)
        header = file.read(int.from_bytes(begin, "little"))
        yield begin + re.sub(rb'"sha256":"[0-9a-f]{64}"', f'"sha256":"{UNKNOWN}"'.encode(), header, count=1)
        yield from iter(lambda: file.read(BLOCK), b"")


def _header(path: Path) -> tuple[Header, Metadata]:
    try:
        header = read_header(path)
        metadata = validate(Metadata, header.metadata)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of examples") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise DataError(f"{path}: not a file of examples that this weft reads: {error}") from None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from None
    for name, place in header.tensors.items():
        if place.dtype not in TYPES or len(place.shape) != 1:
            raise DataError(f"{path}: not a file of examples that this weft reads: '{name}' is not a list of numbers")
    return header, metadata
