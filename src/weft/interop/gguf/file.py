"""The GGUF container: a header of typed keys, a table of tensors, and their bytes (ggml's `docs/gguf.md`, version 3).

Every count and length is checked against what is left of the file before it is used, so that a header with absurd sizes
costs nothing. Tensors are read from the map_file file when they are asked for. The `gguf` package converts quantized
blocks; its reader takes twenty times as long and sixteen times the memory for a vocabulary of 128,000 tokens.
"""

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.errors import InteropError, suggestion
from weft.interop.gguf import q4_k
from weft.storage.files import replacing
from weft.storage.tensors import byte_view
from weft.storage.untrusted import Cursor, map_file

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
MAX_NAME_BYTES = 256  # of a key or a tensor
MAX_DIMENSIONS = 4  # of a tensor in ggml
CHUNK = 2**22  # numbers that are quantized or dequantized at a time

# the types of a key's value: number → struct's letter; strings and arrays have their own form
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


class Encoding(NamedTuple):
    """How numbers are stored: `block` of them in `bytes` bytes."""

    number: int
    name: str
    block: int
    bytes: int
    file_type: int  # `general.file_type` of a file whose numbers are mostly of this kind


_ENCODINGS = (
    Encoding(0, "F32", 1, 4, 0), Encoding(1, "F16", 1, 2, 1), Encoding(30, "BF16", 1, 2, 32),
    Encoding(2, "Q4_0", 32, 18, 2), Encoding(3, "Q4_1", 32, 20, 3), Encoding(6, "Q5_0", 32, 22, 8),
    Encoding(7, "Q5_1", 32, 24, 9), Encoding(8, "Q8_0", 32, 34, 7), Encoding(10, "Q2_K", 256, 84, 10),
    Encoding(11, "Q3_K", 256, 110, 12), Encoding(12, "Q4_K", 256, 144, 15), Encoding(13, "Q5_K", 256, 176, 17),
    Encoding(14, "Q6_K", 256, 210, 18),
)  # fmt: skip
ENCODINGS = {each.number: each for each in _ENCODINGS}
BY_NAME = {each.name: each for each in ENCODINGS.values()}
# the names of mixtures, which keep more bits for some tensors than for most
MIXTURES = {11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
FILE_TYPES = {each.file_type: each.name for each in _ENCODINGS} | MIXTURES
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Value(NamedTuple):
    """A key's value with its type; for an array, `of` is the type of what it holds."""

    type: int
    value: Any
    of: int = STRING


def typed(value: Any) -> Value:
    """A value with the type that llama.cpp expects for it."""
    types = {str: STRING, bool: BOOL, int: UINT32, float: FLOAT32}
    if not isinstance(value, list):
        return Value(types[type(value)], value)
    held = type(value[0]) if value else str  # an empty array is one of merges, of a tokenizer of single bytes
    return Value(ARRAY, value, INT32 if held is int else types[held])


class Entry(NamedTuple):
    """A tensor in a file: its shape (in torch's order), and where and how its numbers are stored."""

    shape: tuple[int, ...]
    encoding: Encoding
    start: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """A file's keys, and its tensors by name."""

    path: Path
    keys: dict[str, Value]
    tensors: dict[str, Entry]
    map_file: memoryview

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        found = self.keys.get(key)
        return default if found is None else found.value

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, or in fp32 where it is quantized."""
        entry, raw = self.tensors[name], self.raw(name)
        dtype = DTYPES.get(entry.encoding.name)
        if dtype is not None:
            return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(entry.shape)
        return _dequantize(raw, entry)

    def blocks(self, name: str) -> Tensor:
        """A tensor's bytes as a tensor (bytes,)."""
        return torch.frombuffer(bytearray(self.raw(name)), dtype=torch.uint8)

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes."""
        entry = self.tensors[name]
        return self.map_file[entry.start : entry.start + entry.bytes]


def _dequantize(raw: memoryview, entry: Entry) -> Tensor:
    """Quantized blocks as fp32, some rows at a time: this takes a few times the memory of its result."""
    row = entry.shape[-1] // entry.encoding.block * entry.encoding.bytes
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row)
    out = torch.empty(rows.shape[0], entry.shape[-1])
    step = max(1, CHUNK // entry.shape[-1])
    for start in range(0, rows.shape[0], step):
        with np.errstate(all="ignore"):  # a damaged scale gives inf, as in other programs, not a warning
            unpacked = quantization().dequantize(rows[start : start + step], entry.encoding.number)
        out[start : start + step] = torch.from_numpy(unpacked)
    return out.reshape(entry.shape)


def quantization() -> Any:
    """The module that quantizes and dequantizes blocks, or an error that names its package."""
    try:
        from gguf import quants
    except ImportError:
        raise InteropError("quantized weights need the package 'gguf'; pip install 'weft[gguf]'") from None
    return quants


def open_file(path: Path) -> Contents:
    """The keys and the table of tensors of a file; the tensors themselves stay on the disk."""
    cursor = Cursor(path, map_file(path))
    magic = bytes(cursor.data[:4])
    if magic != MAGIC:
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.take(4, "the header")
    version = cursor.number("I", "the header")
    if version not in (2, 3):
        found = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise cursor.error(f"{found} of GGUF; weft reads versions 2 and 3, little-endian")
    tensors = cursor.number("Q", "the header")
    keys: dict[str, Value] = {}
    for _ in range(cursor.count("Q", 13, "keys")):
        key = _name(cursor, "a key")
        if key in keys:
            raise cursor.error(f"the key '{key}' appears twice")
        keys[key] = _read_value(cursor, cursor.number("I", f"'{key}'"), key)
    alignment = keys["general.alignment"].value if "general.alignment" in keys else ALIGNMENT
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment = {alignment!r}: expected a power of two")
    return Contents(path, keys, _read_table(cursor, tensors, alignment), cursor.data)


def _name(cursor: Cursor, what: str) -> str:
    """The name of a key or a tensor, which is short and has no characters that would garble a message."""
    start, length = cursor.offset, cursor.number("Q", what)
    raw = bytes(cursor.take(length, what)) if length <= MAX_NAME_BYTES else b""
    if not raw or not raw.isascii() or not raw.decode().isprintable():
        raise cursor.error(f"damaged: at byte {start:,} there should be the name of {what}")
    return raw.decode()


def _read_value(cursor: Cursor, type: int, key: str) -> Value:
    if type != ARRAY:
        return Value(type, _read_values(cursor, type, 1, key)[0])
    of = cursor.number("I", f"'{key}'")
    count = cursor.count("Q", 8 if of == STRING else 1, f"values of '{key}'")
    return Value(type, _read_values(cursor, of, count, key), of)


def _read_values(cursor: Cursor, type: int, count: int, key: str) -> list[Any]:
    what = f"'{key}'"
    if type == STRING:
        raws = (cursor.take(cursor.number("Q", what), what) for _ in range(count))
        return [bytes(raw).decode("utf-8", "replace") for raw in raws]
    if type not in SCALARS:
        raise cursor.error(f"{what} holds values of type {type}, which GGUF does not have")
    form = f"<{count}{SCALARS[type]}"
    return list(struct.unpack(form, cursor.take(struct.calcsize(form), what)))


def _read_table(cursor: Cursor, count: int, alignment: int) -> dict[str, Entry]:
    if count * 32 > cursor.left:
        raise cursor.error(f"truncated or damaged: {count:,} tensors do not fit into the {cursor.left:,} bytes left")
    listed: dict[str, Entry] = {}
    for _ in range(count):
        name = _name(cursor, "a tensor")
        dimensions = cursor.number("I", f"'{name}'")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.error(f"'{name}' has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.number("Q", f"'{name}'") for _ in range(dimensions)]))
        kind = cursor.number("I", f"'{name}'")
        if kind not in ENCODINGS:
            raise cursor.error(f"'{name}' is of ggml type {kind}; {suggestion(str(kind), BY_NAME, len(BY_NAME))}")
        encoding = ENCODINGS[kind]
        if name in listed:
            raise cursor.error(f"the tensor '{name}' appears twice")
        if min(shape) < 1 or shape[-1] % encoding.block:
            raise cursor.error(f"'{name}' {list(shape)}: no rows of blocks of {encoding.block} ({encoding.name})")
        length = prod(shape) // encoding.block * encoding.bytes
        listed[name] = Entry(shape, encoding, cursor.number("Q", f"'{name}'"), length)
    begin, size = -(-cursor.offset // alignment) * alignment, len(cursor.data)
    placed = {name: entry._replace(start=begin + entry.start) for name, entry in listed.items()}
    for name, entry in placed.items():
        if (end := entry.start + entry.bytes) > size:
            raise cursor.error(f"truncated: '{name}' ends at byte {end:,}, the file at {size:,}")
    return placed


class LazyTensor(NamedTuple):
    """A tensor to write: its shape, its encoding (None: its former one while that holds it, else its own dtype), and
    how to read it.

    `former` is its encoding in the file that it came from, if it did, and `blocks` reads the bytes (bytes,) of a
    quantized one: they are written as they came while they still give the tensor's numbers.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding | None
    read: Callable[[], Tensor]
    former: Encoding | None = None
    blocks: Callable[[], Tensor] | None = None


def write_file(
    path: Path, keys: Mapping[str, Value], tensors: Sequence[LazyTensor], advance: Callable[[int], None]
) -> None:
    """Write a whole file, or nothing. One tensor is in memory at a time; `advance` moves a progress bar on by one."""
    own = {dtype: BY_NAME[name] for name, dtype in DTYPES.items()}
    numbers: Counter[Encoding] = Counter()
    table = {lazy.name: Entry(lazy.shape, BY_NAME["F32"], 0, 0) for lazy in tensors}
    with replacing(Path(os.path.realpath(path))) as file:  # so that `a/../b` does not create `a`
        assert "general.file_type" in keys, "its place is taken here and filled in at the end"
        file.write(_header(keys, table))  # as long as the final one, which is known when the tensors are written
        begin = _pad(file)
        for lazy in tensors:
            tensor = lazy.read().detach().cpu().contiguous()
            assert tuple(tensor.shape) == lazy.shape, lazy.name
            kept = _as_it_came(lazy, tensor)
            encoding = (lazy.former if kept else lazy.encoding) or own.get(tensor.dtype, BY_NAME["F32"])
            table[lazy.name] = Entry(lazy.shape, encoding, file.tell() - begin, 0)
            numbers[encoding] += tensor.numel()
            file.writelines([kept] if kept else _bytes(lazy.name, tensor, encoding))
            _pad(file)
            advance(1)
        file.seek(0)
        most, asked = numbers.most_common(1)[0][0], keys["general.file_type"]
        if most.block == 1 or not asked.value:  # what was asked for may be a mixture, by whatever most of it is named
            asked = typed(most.file_type)
        file.write(_header({**keys, "general.file_type": asked}, table))


def _as_it_came(lazy: LazyTensor, tensor: Tensor) -> memoryview | None:
    """The bytes that a tensor came with, if they are wanted and still give its numbers."""
    encoding = lazy.former
    if encoding is None or lazy.encoding not in (None, encoding):
        return None
    if lazy.blocks is None:
        stored = numbers = tensor.to(DTYPES[encoding.name])
    else:
        stored, size = lazy.blocks(), prod(lazy.shape) // encoding.block * encoding.bytes
        if stored.dtype != torch.uint8 or stored.shape != (size,) or lazy.shape[-1] % encoding.block:
            return None
        numbers = _dequantize(_raw(stored), Entry(lazy.shape, encoding, 0, size))
    # the same in fp32 to the last bit; NaN too
    same = torch.equal(numbers.float().view(torch.int32), tensor.float().view(torch.int32))
    return _raw(stored) if same else None


def _raw(tensor: Tensor) -> memoryview:
    return byte_view(tensor).numpy().data


def _bytes(name: str, tensor: Tensor, encoding: Encoding) -> Iterator[bytes | memoryview]:
    if encoding.name in DTYPES:
        stored = tensor.to(DTYPES[encoding.name])
        if encoding.name == "F16" and stored.isinf().any() and not tensor.isinf().any():
            raise InteropError(f"'{name}' holds {tensor.abs().max():.3g}, which fp16 can't; choose another dtype")
        yield _raw(stored)
        return
    for rows in tensor.flatten(0, -2).split(max(1, CHUNK // tensor.shape[-1])):
        if encoding.name == "Q4_K":
            yield q4_k.quantize(rows.float()).numpy().tobytes()
        else:
            yield quantization().quantize(rows.float().numpy(), encoding.number).tobytes()


def _header(keys: Mapping[str, Value], table: Mapping[str, Entry]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(table), len(keys))]
    for key, (type, value, of) in keys.items():
        parts += [_text(key), struct.pack("<I", type)]
        if type == ARRAY:
            parts.append(struct.pack("<IQ", of, len(value)))
        parts.append(_packed(of, value) if type == ARRAY else _packed(type, [value]))
    for name, (shape, encoding, start, _) in table.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), dims, struct.pack("<IQ", encoding.number, start)]
    return b"".join(parts)


def _packed(type: int, values: Sequence[Any]) -> bytes:
    if type == STRING:
        return b"".join(map(_text, values))
    return struct.pack(f"<{len(values)}{SCALARS[type]}", *values)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pad(file: IO[bytes]) -> int:
    """Pad with zeros to the next place where a tensor may begin, and return that place."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    return file.tell()
