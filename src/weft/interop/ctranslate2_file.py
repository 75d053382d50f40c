"""CTranslate2's model.bin: variables one after another, each with its name, shape and type, and aliases at the end.

Little-endian; a string is its length with a closing zero in two bytes, then its characters. Nothing is read but the
list of variables until a tensor is asked for.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.errors import InteropError

VERSIONS = range(2, 7)
# type number, and the type of an element as numpy reads it; bfloat16 is unknown there
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
NUMPY = {"float32": "<f4", "int8": "<i1", "int16": "<i2", "int32": "<i4", "float16": "<f2", "bfloat16": "<i2"}
BY_SIZE = {1: "int8", 2: "int16", 4: "float32"}  # before version 4 a file gave the size of an element alone
MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Variable:
    """Where a variable lies in the file, and what it is."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


@dataclass(frozen=True)
class Stored:
    """A model.bin: what it is said to be, its variables, and which names stand for another one's variable."""

    path: Path
    kind: str
    revision: int
    variables: Mapping[str, Variable]
    aliases: Mapping[str, str]
    data: mmap.mmap

    def resolve(self, name: str) -> str:
        """The name under which a variable is stored."""
        return self.aliases.get(name, name)

    def __contains__(self, name: str) -> bool:
        return self.resolve(name) in self.variables

    def shape(self, name: str) -> tuple[int, ...]:
        return self.variables[self.resolve(name)].shape

    def array(self, name: str) -> np.ndarray:
        """A variable as it is stored; bfloat16 as the 16-bit numbers that hold it."""
        found = self.variables[self.resolve(name)]
        flat = np.frombuffer(self.data, NUMPY[found.dtype], prod(found.shape), found.start)
        return flat.reshape(found.shape)

    def number(self, *names: str) -> float | None:
        """A setting, under the first of these names that is there."""
        for name in names:
            if name in self:
                found = self.variables[self.resolve(name)]
                if prod(found.shape) != 1:
                    raise InteropError(f"{self.path}: '{name}' {list(found.shape)} should be a single number")
                return float(self.tensor(name).flatten()[0])
        return None

    def tensor(self, name: str) -> Tensor:
        """A variable as numbers: integers with a scale are divided by it, row by row for int8 (int16: all by one)."""
        dtype = self.variables[self.resolve(name)].dtype
        scale_name = f"{self.resolve(name)}_scale"
        values = torch.from_numpy(self.array(name).copy())
        if dtype == "bfloat16":
            return values.view(torch.bfloat16)
        if scale_name not in self:
            return values
        scale = self.tensor(scale_name).float()
        if scale.shape not in ((), (1,), values.shape[:1]) or bool((scale == 0).any()):
            raise InteropError(f"{self.path}: '{scale_name}' {list(scale.shape)} fits no '{name}' {list(values.shape)}")
        return values.float() / (scale[:, None] if scale.shape == values.shape[:1] and values.dim() == 2 else scale)


def load(path: Path) -> Stored:
    """The list of a file's variables."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except ValueError:
        raise InteropError(f"{path}: the file is empty") from None
    except OSError as error:
        raise InteropError(f"{path}: cannot be read: {error.strerror}") from None
    reader = _Reader(path, data)
    version = reader.number("<I")
    if version not in VERSIONS:
        raise InteropError(
            f"{path}: not a CTranslate2 model, or of a version weft does not know: it begins with {version}, "
            f"known are {VERSIONS.start} … {VERSIONS.stop - 1}"
        )
    kind, revision = reader.text(), reader.number("<I")
    variables: dict[str, Variable] = {}
    for _ in range(reader.number("<I")):
        name = reader.text()
        if name in variables:
            raise InteropError(f"{path}: the variable '{name}' stands in it twice")
        variables[name] = reader.variable(name, version)
    aliases = {}
    for _ in range(reader.number("<I") if version >= 3 else 0):
        alias, name = reader.text(), reader.text()
        if name not in variables or alias in variables:
            raise InteropError(f"{path}: the alias '{alias}' stands for '{name}', which is no variable")
        aliases[alias] = name
    if reader.place != len(data):
        raise InteropError(f"{path}: {len(data) - reader.place} bytes follow the end of the model")
    return Stored(path, kind, revision, variables, aliases, data)


class _Reader:
    """A place in the file that moves on; past the end is an error."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.place = path, data, 0

    def take(self, size: int) -> int:
        """The beginning of the next `size` bytes."""
        start = self.place
        if size > len(self.data) - start:
            raise InteropError(f"{self.path}: truncated: {size} bytes wanted at byte {start} of {len(self.data)}")
        self.place += size
        return start

    def number(self, form: str) -> int:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        size = self.number("<H")
        start = self.take(size)
        try:
            return self.data[start : start + size].rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError:
            raise InteropError(f"{self.path}: the name at byte {start} is no UTF-8 text") from None

    def variable(self, name: str, version: int) -> Variable:
        dimensions = self.number("<B")
        if dimensions > MOST_DIMENSIONS:
            raise InteropError(f"{self.path}: '{name}' has {dimensions} dimensions, more than any tensor has")
        shape = tuple(self.number("<I") for _ in range(dimensions))
        kind, count = self.number("<B"), self.number("<I")
        known = dict(enumerate(TYPES)) if version >= 4 else BY_SIZE
        if kind not in known:
            raise InteropError(f"{self.path}: '{name}' is of type {kind}; known are {', '.join(TYPES)}")
        dtype = known[kind]
        size = count if version >= 4 else count * kind
        if size != prod(shape) * np.dtype(NUMPY[dtype]).itemsize:
            raise InteropError(f"{self.path}: '{name}' {list(shape)} of {dtype} does not fill its {size} bytes")
        return Variable(shape, dtype, self.take(size), size)
