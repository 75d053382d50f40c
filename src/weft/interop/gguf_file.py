"""The GGUF container: a header of typed keys, a table of tensors, and their bytes (ggml's `docs/gguf.md`, version 3).

A file comes from strangers: every count and length is checked against what is left of the file before anything is
made of it, so that a header of absurd sizes costs nothing. Tensors are read from the mapped file when asked for.
"""

import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.errors import InteropError, suggestion
from weft.files import replacing

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
LONGEST_NAME = 256  # characters of a key or a tensor's name
DEEPEST = 4  # dimensions of a tensor that ggml has
CHUNK = 2**22  # numbers that are unpacked at a time

# the types of a key's value: number → struct's letter; strings and arrays have their own form
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


class Encoding(NamedTuple):
    """How numbers lie in a file: so many of them in a block of so many bytes."""

    number: int
    name: str
    block: int
    bytes: int
    file_type: int  # what `general.file_type` says where most tensors are of this kind


ENCODINGS = {
    each.number: each
    for each in (
        Encoding(0, "F32", 1, 4, 0),
        Encoding(1, "F16", 1, 2, 1),
        Encoding(2, "Q4_0", 32, 18, 2),
        Encoding(3, "Q4_1", 32, 20, 3),
        Encoding(6, "Q5_0", 32, 22, 8),
        Encoding(7, "Q5_1", 32, 24, 9),
        Encoding(8, "Q8_0", 32, 34, 7),
        Encoding(10, "Q2_K", 256, 84, 10),
        Encoding(11, "Q3_K", 256, 110, 12),
        Encoding(12, "Q4_K", 256, 144, 15),
        Encoding(13, "Q5_K", 256, 176, 17),
        Encoding(14, "Q6_K", 256, 210, 18),
        Encoding(30, "BF16", 1, 2, 32),
    )
}
BY_NAME = {each.name: each for each in ENCODINGS.values()}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Value(NamedTuple):
    """A key's value with its type; for an array, `of` is the type of what it holds."""

    type: int
    value: Any
    of: int = STRING


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its shape (in torch's order), and where and how its numbers lie."""

    shape: tuple[int, ...]
    encoding: Encoding
    start: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """What a file says of itself, and its tensors by name."""

    path: Path
    keys: dict[str, Value]
    tensors: dict[str, Entry]
    mapped: memoryview

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        found = self.keys.get(key)
        return default if found is None else found.value

    def tensor(self, name: str) -> Tensor:
        """A tensor's numbers as they were stored, or unpacked to fp32 where they lie in blocks."""
        entry = self.tensors[name]
        raw = self.mapped[entry.start : entry.start + entry.bytes]
        dtype = DTYPES.get(entry.encoding.name)
        if dtype is not None:
            return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(entry.shape)
        return _unpack(raw, entry)

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes."""
        entry = self.tensors[name]
        return self.mapped[entry.start : entry.start + entry.bytes]


# ---- blocks of few bits


def _unpack(raw: memoryview, entry: Entry) -> Tensor:
    """Blocks of few bits as fp32, some rows at a time: unpacking takes a few times the room of its result."""
    quants = packing()
    kind = _kind(entry.encoding)
    row = entry.shape[-1] // entry.encoding.block * entry.encoding.bytes
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row)
    out = torch.empty(rows.shape[0], entry.shape[-1])
    step = max(1, CHUNK // entry.shape[-1])
    for start in range(0, rows.shape[0], step):
        with np.errstate(all="ignore"):  # a damaged scale gives inf, as it does elsewhere, not a warning
            out[start : start + step] = torch.from_numpy(quants.dequantize(rows[start : start + step], kind))
    return out.reshape(entry.shape)


def _pack(tensor: Tensor, encoding: Encoding) -> Iterator[bytes]:
    """fp32 numbers as blocks of few bits, some rows at a time."""
    quants = packing()
    kind = _kind(encoding)
    rows = tensor.flatten(0, -2)
    step = max(1, CHUNK // tensor.shape[-1])
    for start in range(0, rows.shape[0], step):
        yield quants.quantize(rows[start : start + step].float().numpy(), kind).tobytes()


def packing() -> Any:
    """The module that packs and unpacks blocks, or an error that names its package."""
    try:
        from gguf import quants
    except ImportError:
        raise InteropError("blocks of few bits need the package 'gguf'; pip install 'weft[gguf]'") from None
    return quants


def _kind(encoding: Encoding) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(encoding.number)


# ---- reading


def open_file(path: Path) -> Contents:
    """The keys and the table of tensors of a file; the tensors themselves stay on the disk."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InteropError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _Reader(path, mapped).contents()


class _Reader:
    """Goes through a header from its first byte to its last."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.place = path, data, 0

    def wrong(self, what: str) -> InteropError:
        return InteropError(f"{self.path}: {what}")

    def take(self, length: int, what: str) -> memoryview:
        """The next `length` bytes."""
        left = len(self.data) - self.place
        if length > left:
            raise self.wrong(
                f"cut short or damaged: {what} needs {length:,} bytes at {self.place:,}, {left:,} are left"
            )
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter), what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        return bytes(self.take(length, what)).decode("utf-8", "replace")

    def name(self, what: str) -> str:
        """The name of a key or a tensor, which is short and has no signs that would garble a message."""
        start, length = self.place, self.number("Q", what)
        raw = bytes(self.take(length, what)) if length <= LONGEST_NAME else b""
        if not raw or not raw.isascii() or not raw.decode().isprintable():
            raise self.wrong(f"damaged: at byte {start:,} the name of {what} should stand")
        return raw.decode()

    def count(self, smallest: int, what: str) -> int:
        """How many of something follow, each of `smallest` bytes at least."""
        count = self.number("Q", what)
        left = len(self.data) - self.place
        if count * smallest > left:
            raise self.wrong(f"cut short or damaged: {count:,} {what} cannot lie in the {left:,} bytes that are left")
        return count

    def value(self, type: int, key: str) -> Value:
        """What follows a key."""
        if type in SCALARS:
            return Value(type, self.number(SCALARS[type], f"'{key}'"))
        if type == STRING:
            return Value(type, self.text(f"'{key}'"))
        if type == ARRAY:
            of = self.number("I", f"'{key}'")
            if of in SCALARS:
                size = struct.calcsize("<" + SCALARS[of])
                count = self.count(size, f"values of '{key}'")
                raw = self.take(count * size, f"'{key}'")
                return Value(type, list(struct.unpack(f"<{count}{SCALARS[of]}", raw)), of)
            if of == STRING:
                return Value(type, [self.text(f"'{key}'") for _ in range(self.count(8, f"values of '{key}'"))], of)
            raise self.wrong(f"'{key}' is an array of values of type {of}, which GGUF has not")
        raise self.wrong(f"'{key}' is of type {type}, which GGUF has not")

    def contents(self) -> Contents:
        if bytes(self.data[:4]) != MAGIC:
            raise self.wrong(f"not a GGUF file: it begins with {bytes(self.data[:4])!r}, not {MAGIC!r}")
        self.take(4, "the header")
        version = self.number("I", "the header")
        if version not in (2, 3):
            known = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise self.wrong(f"{known} of GGUF; known are versions 2 and 3, little-endian")
        tensors = self.number("Q", "the header")
        keys: dict[str, Value] = {}
        for _ in range(self.count(13, "keys")):
            key = self.name("a key")
            if key in keys:
                raise self.wrong(f"the key '{key}' comes twice")
            keys[key] = self.value(self.number("I", f"'{key}'"), key)
        return Contents(self.path, keys, self.table(tensors, self.alignment(keys)), self.data)

    def alignment(self, keys: Mapping[str, Value]) -> int:
        alignment = keys["general.alignment"].value if "general.alignment" in keys else ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment = {alignment!r}: expected a power of two")
        return alignment

    def table(self, count: int, alignment: int) -> dict[str, Entry]:
        """Every tensor's name, shape, kind and place."""
        left = len(self.data) - self.place
        if count * 32 > left:
            raise self.wrong(f"cut short or damaged: {count:,} tensors cannot be listed in {left:,} bytes")
        listed: dict[str, tuple[tuple[int, ...], Encoding, int]] = {}
        for _ in range(count):
            name = self.name("a tensor")
            deep = self.number("I", f"'{name}'")
            if not 1 <= deep <= DEEPEST:
                raise self.wrong(f"'{name}' has {deep} dimensions; expected 1 to {DEEPEST}")
            shape = tuple(reversed([self.number("Q", f"'{name}'") for _ in range(deep)]))
            kind = self.number("I", f"'{name}'")
            if kind not in ENCODINGS:
                raise self.wrong(f"'{name}' is of ggml type {kind}; {suggestion(str(kind), BY_NAME, len(BY_NAME))}")
            if name in listed:
                raise self.wrong(f"the tensor '{name}' comes twice")
            listed[name] = shape, ENCODINGS[kind], self.number("Q", f"'{name}'")
        begin = -(-self.place // alignment) * alignment
        return {name: self.entry(name, begin, *each) for name, each in listed.items()}

    def entry(self, name: str, begin: int, shape: tuple[int, ...], encoding: Encoding, offset: int) -> Entry:
        """A tensor's place, which must lie within the file."""
        if min(shape) < 1 or shape[-1] % encoding.block:
            raise self.wrong(f"'{name}' is {list(shape)}, which blocks of {encoding.block} ({encoding.name}) cannot be")
        start, length = begin + offset, prod(shape) // encoding.block * encoding.bytes
        if start + length > len(self.data):
            raise self.wrong(f"cut short: '{name}' ends at byte {start + length:,}, the file at {len(self.data):,}")
        return Entry(shape, encoding, start, length)


# ---- writing


class Slot(NamedTuple):
    """A tensor that is to be written: its shape, its kind (None: as it is held), and how to get it."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding | None
    make: Callable[[], Tensor]


def write_file(path: Path, keys: Mapping[str, Value], slots: Iterable[Slot], written: Callable[[int], None]) -> None:
    """Put a whole file at `path`, or nothing. One tensor is in memory at a time; `written` is told of each."""
    slots = list(slots)
    numbers: Counter[Encoding] = Counter()
    with _beside(path) as file:
        table = [(slot.name, slot.shape, slot.encoding or BY_NAME["F32"], 0) for slot in slots]
        assert "general.file_type" in keys, "its place is taken here and filled in at the end"
        file.write(_header(keys, table))  # as long as the true one, which is known when the tensors are written
        begin = _pad(file)
        for number, slot in enumerate(slots):
            tensor = slot.make().detach().cpu()
            assert tuple(tensor.shape) == slot.shape, slot.name
            encoding = slot.encoding or _held(tensor.dtype)
            table[number] = slot.name, slot.shape, encoding, file.tell() - begin
            numbers[encoding] += tensor.numel()
            for piece in _bytes(slot.name, tensor.contiguous(), encoding):
                file.write(piece)
            _pad(file)
            written(1)
        most = max(numbers, key=numbers.__getitem__)
        file.seek(0)
        file.write(_header({**keys, "general.file_type": Value(UINT32, most.file_type)}, table))


def _held(dtype: torch.dtype) -> Encoding:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return BY_NAME[names.get(dtype, "F32")]


def _bytes(name: str, tensor: Tensor, encoding: Encoding) -> Iterator[bytes | memoryview]:
    if encoding.name not in DTYPES:
        return _pack(tensor, encoding)
    stored = tensor.to(DTYPES[encoding.name])
    if encoding.name == "F16" and stored.isinf().any() and not tensor.isinf().any():
        raise InteropError(f"'{name}' holds {tensor.abs().max():.3g}, which fp16 cannot; choose another dtype")
    return iter([stored.flatten().view(torch.uint8).numpy().data])


def _header(keys: Mapping[str, Value], table: list[tuple[str, tuple[int, ...], Encoding, int]]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(table), len(keys))]
    for key, value in keys.items():
        parts += [_text(key), struct.pack("<I", value.type), _value(value)]
    for name, shape, encoding, offset in table:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), dims, struct.pack("<IQ", encoding.number, offset)]
    return b"".join(parts)


def _value(value: Value) -> bytes:
    if value.type == STRING:
        return _text(value.value)
    if value.type != ARRAY:
        return struct.pack("<" + SCALARS[value.type], value.value)
    head = struct.pack("<IQ", value.of, len(value.value))
    if value.of == STRING:
        return head + b"".join(map(_text, value.value))
    return head + struct.pack(f"<{len(value.value)}{SCALARS[value.of]}", *value.value)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pad(file: IO[bytes]) -> int:
    """Zeros up to the next place where a tensor may begin, which is given back."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    return file.tell()


@contextmanager
def _beside(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` when it is whole and on the disk."""
    try:
        with replacing(Path(os.path.realpath(path))) as file:  # of `a/..` nothing is made
            yield file
    except OSError as error:
        raise InteropError(f"{path}: cannot be written: {error.strerror or error}") from None
