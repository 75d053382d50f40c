"""The header of a safetensors file, read without torch: which tensors are in it, and where each lies.

The file is eight bytes with the length of the header, the header in JSON, and the tensors one after another without a
gap. A file may come from strangers: the header is checked against the file's size before anything in it is used.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.storage import files

MAX_HEADER_BYTES = 100_000_000  # as the format has it
MAX_DIMENSIONS = 64  # as many as torch and numpy allow
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: its bytes from `begin` to `end` of the file, its shape, its type as the format calls it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. Tensors are in the order of the file; `text` is the header to the letter."""

    text: str
    metadata: dict[str, str]
    tensors: dict[str, Place]
    begin: int  # of the first tensor
    end: int  # of the last: the size of the file


def read_header(path: Path) -> Header:
    """The header of a file. Raises OSError, or ValueError with the reason where it is not a whole safetensors file."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError("its header is cut short")
        header = parse_header(file.read(length))
    if header.end != size:
        raise ValueError(f"{size} bytes instead of {header.end}")
    return header


def parse_header(raw: bytes) -> Header:
    """A header from its bytes; ValueError with the reason where it is not one."""
    try:
        text = raw.decode()
        tree = json.loads(text)
        metadata = tree.pop("__metadata__", None) or {}
        places = {name: _place(name, entry, 8 + len(raw)) for name, entry in tree.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
        raise ValueError("its header is damaged") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header is damaged: the metadata is not text by name")
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = begin = 8 + len(raw)
    for name, place in ordered.items():
        if place.begin != at:
            raise ValueError(f"its tensors don't follow each other: '{name}' begins at {place.begin} instead of {at}")
        at = place.end
    return Header(text, metadata, ordered, begin, at)


def _place(name: str, entry: dict[str, Any], begin: int) -> Place:
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = (*shape[:MAX_DIMENSIONS], first, last)
    sizes = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
    if not isinstance(dtype, str) or len(shape) > MAX_DIMENSIONS or not sizes:
        raise TypeError
    if last < first or (dtype in BITS and (last - first) * 8 != math.prod(shape) * BITS[dtype]):
        raise ValueError(f"'{name}' has {last - first} bytes, which are not {dtype} {list(shape)}")
    return Place(dtype, tuple(shape), begin + first, begin + last)
