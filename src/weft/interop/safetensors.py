"""Safetensors files read and written a tensor at a time, so that a model may be larger than the memory.

The file is eight bytes with the length of a JSON header, the header, and the tensors one after the other.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weft.errors import InteropError
from weft.files import sync
from weft.interop.bundle import LazyWeights
from weft.safetensors_header import parse_header, read_header
from weft.untrusted import read_object, refuse_pointer

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32", "F64")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file under its name there, not yet read; of a file of torch.save, the tensor on its pages."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    pages: Tensor | None = None


# ---- reading


def sharded(index: Path, listing: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    """Every tensor of the shards, each listed by `listing` and exactly where the index says."""
    folder, ending = index.parent, Path(index.name.removesuffix(".index.json")).suffix
    placed = read_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise InteropError(f"{index}: 'weight_map' does not say which tensor is in which file")
    found: dict[str, Stored] = {}
    for name in sorted({str(name) for name in placed.values()}):
        if not is_shard(name, ending):
            raise InteropError(f"{index}: '{name}' is not the name of a {ending} file beside it")
        if not (folder / name).is_file():
            raise InteropError(f"{folder / name}: missing, though {index.name} names it")
        for tensor, stored in listing(folder / name).items():
            if tensor in found:
                raise InteropError(f"{folder / name}: '{tensor}' is in {found[tensor].file.name} too")
            found[tensor] = stored
    files = {tensor: stored.file.name for tensor, stored in found.items()}
    for tensor in {**placed, **files}:
        if tensor not in placed:
            raise InteropError(f"{found[tensor].file}: '{tensor}' is not in {index.name}")
        if placed[tensor] != files.get(tensor):
            raise InteropError(f"{index}: '{tensor}' is not in {placed[tensor]}, where it should be")
    return found


def is_shard(name: str, ending: str = ".safetensors") -> bool:
    """Whether a name is that of a file beside its index; any other path could lead outside the model."""
    return re.fullmatch(r"[\w][\w.-]*", name) is not None and name.endswith(ending)


def listing(file: Path) -> dict[str, Stored]:
    """Every tensor of one file."""
    refuse_pointer(file)
    try:
        places = read_header(file).tensors
    except OSError as error:
        raise InteropError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InteropError(f"{file}: not a whole safetensors file: {error}") from None
    found = {name: Stored(file, name, place.shape, place.dtype) for name, place in sorted(places.items())}
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES:
            raise InteropError(f"{file}: '{name}' holds numbers of type {tensor.dtype}; weft reads {', '.join(DTYPES)}")
    return found


def headers(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """The header of each safetensors file that tensors are in, byte for byte, by the file's name: with it `write_as`
    can reproduce the file."""
    files = {tensor.file for tensor in tensors.values() if tensor.pages is None}
    return {file.name: read_header(file).text for file in sorted(files)}


def reader(tensors: Mapping[str, Stored]) -> Callable[[str], Tensor]:
    """A function that reads one of these tensors. Its memory is the file's own pages, freed with the tensor."""

    def read(name: str) -> Tensor:
        if (pages := tensors[name].pages) is not None:
            return pages.clone(memory_format=torch.contiguous_format)
        with safe_open(tensors[name].file, "pt") as opened:
            return opened.get_tensor(tensors[name].name)

    return read


def equal(tensors: Mapping[str, Stored], one: str, other: str) -> bool:
    """Whether two stored tensors hold the same bits."""
    a, b, read = tensors[one], tensors[other], reader(tensors)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(_bits(read(one)), _bits(read(other)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---- writing


def write(path: Path, weights: LazyWeights) -> None:
    """Write tensors one after the other and sync; at most one of them is in memory.

    Space is reserved for the header, which is filled in at the end. A tensor's offset must be a multiple of its item
    size, which is known only once it has been read: where dtypes are mixed and that fails, all tensors are written a
    second time, the widest dtypes first.
    """
    reserved = 64 + sum(len(json.dumps(name)) + 256 for name in weights)  # offsets have up to 20 digits, shapes few
    reserved += -reserved % 64
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes: dict[str, int] = {}
    end, misaligned = 0, False
    with open(path, "wb") as file:
        file.seek(8 + reserved)
        for name, make in weights.items():
            tensor = make().detach().cpu()
            start, end, sizes[name] = end, end + tensor.nbytes, tensor.element_size()
            misaligned = misaligned or start % sizes[name] != 0
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
            file.write(_bits(tensor).numpy().data)
            del tensor
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= reserved, "a tensor has more dimensions than space was reserved for"
        file.seek(0)
        file.write(reserved.to_bytes(8, "little") + text.ljust(reserved))
        sync(file)
    if misaligned:
        write(path, {name: weights[name] for name in sorted(sizes, key=lambda each: -sizes[each])})


def write_as(path: Path, header: str, weights: LazyWeights) -> None:
    """Write the tensors that a header names, where it places them, and sync: the file that the header came from."""
    text = header.encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, place in parse_header(text).tensors.items():
            tensor = weights[name]().detach().cpu()
            if (NAMES[tensor.dtype], tuple(tensor.shape)) != (place.dtype, place.shape):
                raise InteropError(f"{path.name}: '{name}' is no longer what it was when it was imported")
            file.write(_bits(tensor).numpy().data)
        sync(file)
