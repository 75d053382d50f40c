"""Examples on disk: ragged fields of token ids and scalar fields, memory-mapped from one safetensors file.

A field of ids is two tensors: `NAME.ids`, the ids of all examples concatenated (uint16 if every id fits, else int32),
and `NAME.offsets` (int64, one more than examples), where each example begins. A scalar field is one tensor,
`NAME.values`. The header's metadata holds the format, the count, notes (the tokenizer's fingerprint, the names of the
labels) and a checksum.
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
from weft.data.shards import BLOCK, Array, HashedStream, Side, map_array, verify
from weft.data.table import Row
from weft.errors import ConfigError, DataError
from weft.storage import files
from weft.storage.files import replacing
from weft.storage.safetensors_header import Header, read_header

Example = Mapping[str, Sequence[int] | int | float]
CHUNK = 1024  # rows encoded in one call
UNKNOWN = "0" * 64  # placeholder of the checksum while it is computed
_CODES = {"U16": "<u2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
TYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in _CODES.items()}


class Metadata(Config):
    """Metadata of the header; safetensors requires strings."""

    format: Literal["weft examples"] = "weft examples"
    version: Literal["1"] = "1"
    count: str = Field(pattern=r"^\d+$")
    notes: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True, eq=False)
class Examples:
    """Memory-mapped examples: fields of ids, one ragged row per example, and fields of one number per example."""

    _count: int
    _ids: Mapping[str, tuple[Array, Array]]  # field → all ids (n,) and offsets (count + 1,)
    _values: Mapping[str, Array]  # field → (count,)
    notes: dict[str, Any]
    fingerprint: str

    @classmethod
    def open(cls, path: Path) -> "Examples":
        """Open a file that `write_sides` wrote; its header, size and offsets are checked."""
        header, metadata = _read_header(path)
        tensors = {
            name: map_array(path, TYPES[info.dtype], info.shape, begin=info.begin)
            for name, info in header.tensors.items()
        }
        count = int(metadata.count)
        values = {key.removesuffix(".values"): tensor for key, tensor in tensors.items() if key.endswith(".values")}
        fields = [key.removesuffix(".offsets") for key in tensors if key.endswith(".offsets")]
        ids = {field: (tensors.get(f"{field}.ids", np.empty(0)), tensors[f"{field}.offsets"]) for field in fields}
        valid = all(len(column) == count for column in values.values()) and len(values) + 2 * len(ids) == len(tensors)
        for flat, offsets in ids.values():
            valid = valid and len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(flat)
            valid = valid and bool((np.diff(offsets) >= 0).all())
        if not valid:
            raise DataError(f"{path}: damaged: its fields don't fit together")
        try:
            notes = json.loads(metadata.notes)
        except ValueError:
            raise DataError(f"{path}: damaged: its notes are not JSON") from None
        fingerprint = hashlib.sha256(json.dumps(json.loads(header.text), sort_keys=True).encode()).hexdigest()
        return cls(count, ids, values, notes=notes, fingerprint=fingerprint)

    def __len__(self) -> int:
        return self._count

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self._ids, *self._values)

    def ids(self, field: str, number: int) -> Array:
        """Ids of an example, copied: (length,) int64."""
        assert 0 <= number < self._count, f"example {number} of {self._count}"
        ids, offsets = self._field(field)
        return ids[int(offsets[number]) : int(offsets[number + 1])].astype(np.int64)

    def flat_ids(self, field: str) -> Array:
        """Concatenated ids of all examples, memory-mapped and read-only: (n,) uint16 or int32."""
        return self._field(field)[0]

    def lengths(self, field: str) -> Array:
        """Number of ids of each example: (count,)."""
        return np.diff(self._field(field)[1])

    def values(self, field: str) -> Array:
        """Values of a scalar field: (count,) int64, or float64 if one of them is not an integer."""
        assert field in self._values, f"no scalar field '{field}'; there are {self.fields}"
        return self._values[field]

    def _field(self, field: str) -> tuple[Array, Array]:
        assert field in self._ids, f"no field of ids '{field}'; there are {self.fields}"
        return self._ids[field]


def label_names(labels: Iterable[str]) -> list[str]:
    """Sort the distinct labels: numerically if all of them are integers, otherwise as text."""
    names = set(labels)
    return sorted(names, key=int) if all(name.lstrip("-").isdecimal() for name in names) else sorted(names)


class Labels:
    """Labels of one column. If `names` is given, labels are numbered in that order, and others are refused.

    Otherwise a label gets a provisional number when it first occurs, and its index in `label_names` once all rows have
    been read; `write_sides` replaces the one by the other. Labels that occur only in validation rows are then refused.
    """

    def __init__(self, column: str, names: Sequence[str] | None = None) -> None:
        self.column = column
        self._fixed = None if names is None else list(names)
        self._numbers = {name: number for number, name in enumerate(names or ())}
        self._validation_only: dict[str, str] = {}  # labels that no training row has had so far → their first row

    def number(self, label: str, row: Row) -> int:
        """Provisional number of a label of this row."""
        if label not in self._numbers:
            if self._fixed is not None:
                raise self._unknown(label, row.where)
            self._numbers[label] = len(self._numbers)
            self._validation_only[label] = row.where
        if self._validation_only and row.side == "train":
            self._validation_only.pop(label, None)
        return self._numbers[label]

    @property
    def names(self) -> list[str]:
        """All labels in their final order, once all rows have been read."""
        for label, where in self._validation_only.items():
            raise self._unknown(label, where)
        return label_names(self._numbers) if self._fixed is None else self._fixed

    @property
    def order(self) -> Array:
        """Final number of each provisional number: (labels,)."""
        final = {name: index for index, name in enumerate(self.names)}
        return np.array([final[name] for name in self._numbers], dtype=np.int64)

    def _unknown(self, label: str, where: str) -> DataError:
        known = self._fixed if self._fixed is not None else label_names(set(self._numbers) - set(self._validation_only))
        shown = ", ".join(known[:12])
        return DataError(f"{where}: '{self.column}' is {label!r}, which no training row has; known: {shown}")


def encode_rows(
    rows: Iterable[Row], make: Callable[[Sequence[Row]], Iterable[Example]]
) -> Iterator[tuple[Side, Example]]:
    """Yield the side and the example of each row, for `write_sides`. `make` is called with many rows at a time, because
    tokenizers are faster that way."""
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
    """Write the examples of each side to a separate file, in one pass, and open the files; other sides are skipped.

    All examples of a side have the same fields: a sequence of integers is a field of ids, a number a scalar field. Only
    a few bytes per example are held in memory. `notes` may be anything that JSON can represent. In fields of `labels`,
    provisional numbers are replaced by final ones; negative numbers are kept.
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
                orders = {field: of_field.order for field, of_field in (labels or {}).items()}
                writer.write(stack.enter_context(replacing(paths[side])), notes or {}, orders)
            # leaving the stack renames all files
    except OSError as error:
        path = error.filename or next(iter(paths.values()))
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
    return {side: Examples.open(path) for side, path in paths.items()}


class _Writer:
    """Collects the examples of one file; ids are spilled to unnamed temporary files until their count is known."""

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
                    file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # closed with the stack
                    self._spills[key] = _Spill(self._files.enter_context(file))
        assert row.keys() == {*self._spills, *self._values}, f"example {self.count} has the fields {[*row]}"
        for key, spill in self._spills.items():
            spill.add(row[key])
        for key, column in self._values.items():
            column.append(row[key])  # type: ignore[arg-type]  # a number, as in the first row
        self.count += 1

    def write(self, stream: IO[bytes], notes: Mapping[str, Any], orders: Mapping[str, Array]) -> None:
        # widest dtypes first: every tensor then begins at a multiple of its item size
        tensors: list[tuple[str, str, int, Iterable[bytes]]] = []
        for key, spill in self._spills.items():
            tensors.append((f"{key}.offsets", "I64", self.count + 1, [np.array(spill.offsets, dtype="<i8").tobytes()]))
        for key, column in self._values.items():
            dtype = "I64" if all(isinstance(value, Integral) for value in column) else "F64"
            values = _reorder(np.array(column, dtype=TYPES[dtype]), orders.get(key))
            tensors.append((f"{key}.values", dtype, self.count, [values.tobytes()]))
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
        metadata["sha256"] = hashed.sha256  # as long as the placeholder
        stream.seek(0)
        stream.write(_header_bytes(header))


class _Spill:
    """Temporary file with the ids of one field."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.offsets = array("q", [0])
        self.low = self.high = 0

    def add(self, ids: Any) -> None:
        row = np.asarray(ids, dtype=np.int64)
        assert row.ndim == 1
        if row.size:
            self.low, self.high = min(self.low, int(row.min())), max(self.high, int(row.max()))
        assert self.low >= -(2**31) and self.high < 2**31, f"ids from {self.low} to {self.high} exceed 32 bits"
        self.stream.write(row.astype("<i4").tobytes())
        self.offsets.append(self.offsets[-1] + len(row))

    @property
    def dtype(self) -> str:
        return "U16" if self.low >= 0 and self.high < 1 << 16 else "I32"

    def blocks(self, order: Array | None) -> Iterator[bytes]:
        self.stream.seek(0)
        for block in iter(lambda: self.stream.read(BLOCK), b""):
            yield _reorder(np.frombuffer(block, "<i4"), order).astype(TYPES[self.dtype]).tobytes()


def _reorder(numbers: Array, order: Array | None) -> Array:
    if order is None:
        return numbers
    return np.where(numbers < 0, numbers, order[np.maximum(numbers, 0)]).astype(numbers.dtype)


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def verify_files(paths: Sequence[Path]) -> None:
    """Verify the checksums of files of examples, all in one folder; DataError if one is damaged."""
    verify(paths[0].parent, {path.name: _read_header(path)[1].sha256 for path in paths}, _hashed_blocks)


def _hashed_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes that a file's checksum covers: all of them, with the checksum itself replaced by zeros."""
    with files.open_regular(path) as file:
        begin = file.read(8)
        header = file.read(int.from_bytes(begin, "little"))
        yield begin + re.sub(rb'"sha256":"[0-9a-f]{64}"', f'"sha256":"{UNKNOWN}"'.encode(), header, count=1)
        yield from iter(lambda: file.read(BLOCK), b"")


def _read_header(path: Path) -> tuple[Header, Metadata]:
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
    for name, info in header.tensors.items():
        if info.dtype not in TYPES or len(info.shape) != 1:
            raise DataError(f"{path}: not a file of examples that this weft reads: '{name}' is not a list of numbers")
    return header, metadata
