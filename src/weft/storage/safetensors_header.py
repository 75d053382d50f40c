"""The header of a safetensors file, parsed without torch: names, dtypes, shapes and byte ranges of its tensors.

A file is an eight-byte header length, the header as JSON, and the tensors one after another without gaps. The file may
be untrusted: the header is checked against the file's size before anything in it is used.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.storage import files

MAX_HEADER_BYTES = 100_000_000  # bytes of a header; the format's own limit
MAX_DIMENSIONS = 64  # of a tensor; the limit of torch and numpy
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype (the format's name), shape and byte range [begin, end) in the file of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. Tensors are in file order; `text` is the header verbatim."""

    text: str
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    begin: int  # offset of the first tensor
    end: int  # end of the last tensor: the size of the file


def read_header(path: Path) -> Header:
    """Read a file's header. Raises OSError, or ValueError with the reason if it is not a complete safetensors file."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("its header is truncated")
        header = parse_header(file.read(length))
    if header.end != size:
        raise ValueError(f"{size} bytes instead of {header.end}")
    return header


def parse_header(raw: bytes) -> Header:
    """Parse a header from its bytes; ValueError with the reason if it is invalid."""
    begin = 8 + len(raw)
    try:
        text = raw.decode()
        tree = json.loads(text)
        metadata = tree.pop("__metadata__", None) or {}
        tensors = {name: _tensor_info(name, entry, begin) for name, entry in tree.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
        raise ValueError("its header is damaged") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header is damaged: metadata must map strings to strings")
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = begin
    for name, info in tensors.items():
        if info.begin != end:
            raise ValueError(f"its tensors are not contiguous: '{name}' begins at {info.begin} instead of {end}")
        end = info.end
    return Header(text, metadata, tensors, begin=begin, end=end)


def _tensor_info(name: str, entry: dict[str, Any], begin: int) -> TensorInfo:
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    integers = (*shape[:MAX_DIMENSIONS], first, last)
    valid = all(type(integer) is int and 0 <= integer < 1 << 63 for integer in integers)
    if not isinstance(dtype, str) or len(shape) > MAX_DIMENSIONS or not valid:
        raise TypeError
    if last < first or (dtype in BITS and (last - first) * 8 != math.prod(shape) * BITS[dtype]):
        raise ValueError(f"'{name}' has {last - first} bytes, which is not the size of {dtype} {list(shape)}")
    return TensorInfo(dtype, tuple(shape), begin=begin + first, end=begin + last)
