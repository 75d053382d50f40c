"""Read and write GGUF containers: typed keys, a table of tensors, and their bytes (ggml's `docs/gguf.md`, version 3).

All counts and lengths are checked against the rest of the file before they are used, so that absurd sizes cost nothing.
Tensors are read lazily from the mapped file. The `gguf` package converts quantised blocks; its reader is not used
because it takes twenty times as long and sixteen times the memory for a vocabulary of 128,000 tokens.
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

from weft.errors import InteropError
from weft.interop.gguf import q4_k
from weft.storage.files import replacing
from weft.storage.tensors import byte_view
from weft.storage.untrusted import Cursor, map_file

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
MAX_NAME_BYTES = 256  # of the name of a key or a tensor
MAX_DIMENSIONS = 4  # of a tensor in ggml
CHUNK = 2**22  # values quantised or dequantised in one call

# scalar types of a key's value: number → letter in a struct format
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


class TensorEncoding(NamedTuple):
    """Encoding of values: `bytes` bytes per `block` values."""

    number: int
    name: str
    block: int
    bytes: int
    file_type: int  # `general.file_type` of a file in which most values have this encoding


_ENCODINGS = (
    (0, "F32", 1, 4, 0), (1, "F16", 1, 2, 1), (30, "BF16", 1, 2, 32), (2, "Q4_0", 32, 18, 2), (3, "Q4_1", 32, 20, 3),
    (6, "Q5_0", 32, 22, 8), (7, "Q5_1", 32, 24, 9), (8, "Q8_0", 32, 34, 7), (10, "Q2_K", 256, 84, 10),
    (11, "Q3_K", 256, 110, 12), (12, "Q4_K", 256, 144, 15), (13, "Q5_K", 256, 176, 17), (14, "Q6_K", 256, 210, 18),
    (39, "MXFP4", 32, 17, 38),
)  # fmt: skip
ENCODINGS = {fields[0]: TensorEncoding(*fields) for fields in _ENCODINGS}
BY_NAME = {encoding.name: encoding for encoding in ENCODINGS.values()}
# names of mixtures, which have more bits for some tensors
MIXTURES = {11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
FILE_TYPES = {encoding.file_type: encoding.name for encoding in ENCODINGS.values()} | MIXTURES
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Value(NamedTuple):
    """A key's value with its type; for an array, `of` is the type of its elements."""

    type: int
    value: Any
    of: int = STRING


def typed(value: Any) -> Value:
    """Add the type that llama.cpp expects for a value."""
    types = {str: STRING, bool: BOOL, int: UINT32, float: FLOAT32}
    if not isinstance(value, list):
        return Value(types[type(value)], value)
    element = type(value[0]) if value else str  # an empty array is the merges of a tokenizer of single bytes
    return Value(ARRAY, value, INT32 if element is int else types[element])


class Entry(NamedTuple):
    """A tensor in a file: its shape (in torch's order), encoding, offset and size in bytes."""

    shape: tuple[int, ...]
    encoding: TensorEncoding
    start: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """Keys and tensors of a mapped file."""

    path: Path
    keys: dict[str, Value]
    tensors: dict[str, Entry]
    data: memoryview

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key."""
        typed_value = self.keys.get(key)
        return default if typed_value is None else typed_value.value

    def tensor(self, name: str) -> Tensor:
        """Read a tensor in its dtype; a quantised one as fp32."""
        entry, raw = self.tensors[name], self.raw(name)
        dtype = DTYPES.get(entry.encoding.name)
        if dtype is not None:
            return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(entry.shape)
        return dequantize(raw, entry)

    def blocks(self, name: str) -> Tensor:
        """Read the bytes of a tensor, (bytes,) uint8."""
        return torch.frombuffer(bytearray(self.raw(name)), dtype=torch.uint8)

    def raw(self, name: str) -> memoryview:
        """Mapped bytes of a tensor."""
        entry = self.tensors[name]
        return self.data[entry.start : entry.start + entry.bytes]


def dequantize(raw: memoryview, entry: Entry, *, chunk: int = CHUNK) -> Tensor:
    """Dequantise blocks to fp32, `chunk` values in one call because it takes several times their memory."""
    row = entry.shape[-1] // entry.encoding.block * entry.encoding.bytes
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row)
    out = torch.empty(rows.shape[0], entry.shape[-1])
    step = max(1, chunk // entry.shape[-1])
    for start in range(0, rows.shape[0], step):
        with np.errstate(all="ignore"):  # a damaged scale gives inf, as in other programs, without a warning
            values = quantization().dequantize(rows[start : start + step], entry.encoding.number)
        out[start : start + step] = torch.from_numpy(values)
    return out.reshape(entry.shape)


def quantization() -> Any:
    """Module that quantises and dequantises blocks; InteropError if its package is not installed."""
    try:
        from gguf import quants
    except ImportError:
        raise InteropError("quantized weights need the package 'gguf'; pip install 'weft[gguf]'") from None
    return quants


def open_file(path: Path) -> Contents:
    """Read the keys and the table of tensors of a file; the tensors stay on the disk."""
    cursor = Cursor(path, map_file(path))
    magic = bytes(cursor.data[:4])
    if magic != MAGIC:
        raise cursor.error(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.take(4, "the header")
    version = cursor.number("I", "the header")
    if version not in (2, 3):
        what = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
        raise cursor.error(f"{what} of GGUF; weft reads versions 2 and 3, little-endian")
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
    return Contents(path, keys, tensors=_read_table(cursor, tensors, alignment), data=cursor.data)


def _name(cursor: Cursor, what: str) -> str:
    """Read the name of a key or a tensor, which must be short and printable."""
    start, length = cursor.offset, cursor.number("Q", what)
    raw = bytes(cursor.take(length, what)) if length <= MAX_NAME_BYTES else b""
    if not raw or not raw.isascii() or not raw.decode().isprintable():
        raise cursor.error(f"damaged: expected the name of {what} at byte {start:,}")
    return raw.decode()


def _read_value(cursor: Cursor, type: int, key: str) -> Value:
    what = f"'{key}'"
    if type != ARRAY:
        return Value(type, _read_values(cursor, type, 1, what=what)[0])
    of = cursor.number("I", what)
    count = cursor.count("Q", 8 if of == STRING else 1, f"values of {what}")
    return Value(type, _read_values(cursor, of, count, what=what), of)


def _read_values(cursor: Cursor, type: int, count: int, *, what: str) -> list[Any]:
    if type == STRING:
        raws = (cursor.take(cursor.number("Q", what), what) for _ in range(count))
        return [bytes(raw).decode("utf-8", "replace") for raw in raws]
    if type not in SCALARS:
        raise cursor.error(f"{what} has type {type}, which GGUF does not have")
    form = f"<{count}{SCALARS[type]}"
    return list(struct.unpack(form, cursor.take(struct.calcsize(form), what)))


def _read_table(cursor: Cursor, count: int, alignment: int) -> dict[str, Entry]:
    if count * 32 > cursor.left:
        raise cursor.error(f"truncated or damaged: {count:,} tensors do not fit into the {cursor.left:,} bytes left")
    relative: dict[str, Entry] = {}  # offsets relative to the first tensor
    for _ in range(count):
        name = _name(cursor, "a tensor")
        dimensions = cursor.number("I", f"'{name}'")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.error(f"'{name}' has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([cursor.number("Q", f"'{name}'") for _ in range(dimensions)]))
        kind = cursor.number("I", f"'{name}'")
        if kind not in ENCODINGS:
            raise cursor.error(f"'{name}' is of ggml type {kind}; weft reads {', '.join(BY_NAME)}")
        encoding = ENCODINGS[kind]
        if name in relative:
            raise cursor.error(f"the tensor '{name}' appears twice")
        if min(shape) < 1 or shape[-1] % encoding.block:
            raise cursor.error(f"'{name}' {list(shape)}: not rows of blocks of {encoding.block} ({encoding.name})")
        size = prod(shape) // encoding.block * encoding.bytes
        relative[name] = Entry(shape, encoding, start=cursor.number("Q", f"'{name}'"), bytes=size)
    begin, file_size = -(-cursor.offset // alignment) * alignment, len(cursor.data)
    table = {name: entry._replace(start=begin + entry.start) for name, entry in relative.items()}
    for name, entry in table.items():
        if (end := entry.start + entry.bytes) > file_size:
            raise cursor.error(f"truncated: '{name}' ends at byte {end:,}, the file at {file_size:,}")
    return table


class LazyTensor(NamedTuple):
    """A tensor to write, with the function that reads it.

    `encoding` None means that of the imported file if it is still lossless, else that of the tensor's dtype. `former`
    is the encoding in the imported file, if any, and `blocks` reads the bytes (bytes,) of a quantised tensor there:
    they are written verbatim if they still decode to the tensor's values.
    """

    name: str
    shape: tuple[int, ...]
    encoding: TensorEncoding | None
    read: Callable[[], Tensor]
    former: TensorEncoding | None = None
    blocks: Callable[[], Tensor] | None = None


def write_file(
    path: Path, keys: Mapping[str, Value], tensors: Sequence[LazyTensor], *, advance: Callable[[int], None]
) -> None:
    """Write a file atomically. One tensor is in memory at a time; `advance(1)` is called after each."""
    by_dtype = {dtype: BY_NAME[name] for name, dtype in DTYPES.items()}
    values: Counter[TensorEncoding] = Counter()
    table = {lazy.name: Entry(lazy.shape, BY_NAME["F32"], start=0, bytes=0) for lazy in tensors}
    with replacing(Path(os.path.realpath(path))) as file:  # so that `a/../b` does not create `a`
        assert "general.file_type" in keys, "reserved here, and filled in at the end"
        file.write(_header(keys, table))  # as long as the final one, which is known after the tensors
        begin = _pad(file)
        for lazy in tensors:
            tensor = lazy.read().detach().cpu().contiguous()
            assert tuple(tensor.shape) == lazy.shape, lazy.name
            original = _original_bytes(lazy, tensor)
            encoding = (lazy.former if original else lazy.encoding) or by_dtype.get(tensor.dtype, BY_NAME["F32"])
            table[lazy.name] = Entry(lazy.shape, encoding, start=file.tell() - begin, bytes=0)
            values[encoding] += tensor.numel()
            file.writelines([original] if original else _encode(lazy.name, tensor, encoding))
            _pad(file)
            advance(1)
        file.seek(0)
        most_common, file_type = values.most_common(1)[0][0], keys["general.file_type"]
        if most_common.block == 1 or not file_type.value:  # otherwise it may name a mixture
            file_type = typed(most_common.file_type)
        file.write(_header({**keys, "general.file_type": file_type}, table))


def _original_bytes(lazy: LazyTensor, tensor: Tensor) -> memoryview | None:
    """Bytes of a tensor in the imported file, if that encoding is requested and they still decode to its values."""
    encoding = lazy.former
    if encoding is None or lazy.encoding not in (None, encoding):
        return None
    if lazy.blocks is None:
        stored = values = tensor.to(DTYPES[encoding.name])
    else:
        stored, size = lazy.blocks(), prod(lazy.shape) // encoding.block * encoding.bytes
        if stored.dtype != torch.uint8 or stored.shape != (size,) or lazy.shape[-1] % encoding.block:
            return None
        values = dequantize(_raw(stored), Entry(lazy.shape, encoding, start=0, bytes=size))
    # compared as bits, so that NaN equals NaN
    same = torch.equal(values.float().view(torch.int32), tensor.float().view(torch.int32))
    return _raw(stored) if same else None


def _raw(tensor: Tensor) -> memoryview:
    return byte_view(tensor).numpy().data


def _encode(name: str, tensor: Tensor, encoding: TensorEncoding) -> Iterator[bytes | memoryview]:
    if encoding.name in DTYPES:
        stored = tensor.to(DTYPES[encoding.name])
        if encoding.name == "F16" and stored.isinf().any() and not tensor.isinf().any():
            value = f"{tensor.abs().max():.3g}"
            raise InteropError(f"'{name}' contains {value}, which fp16 can't represent; choose another dtype")
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
        parts += [_pack_string(key), struct.pack("<I", type)]
        if type == ARRAY:
            parts.append(struct.pack("<IQ", of, len(value)))
        parts.append(_pack(of, value) if type == ARRAY else _pack(type, [value]))
    for name, (shape, encoding, start, _) in table.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_pack_string(name), dims, struct.pack("<IQ", encoding.number, start)]
    return b"".join(parts)


def _pack(type: int, values: Sequence[Any]) -> bytes:
    if type == STRING:
        return b"".join(map(_pack_string, values))
    return struct.pack(f"<{len(values)}{SCALARS[type]}", *values)


def _pack_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pad(file: IO[bytes]) -> int:
    """Pad with zeros to the next aligned offset, and return it."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    return file.tell()
