"""Read CTranslate2's model.bin: a list of variables, each with name, shape and type, and aliases at the end.

Little-endian; a string is its length including a final zero, in two bytes, then its characters. Tensors are read
lazily. Version 1 does not name the kind of model; its variables, and those of the first revision of a kind, have the
names of OpenNMT-tf.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.errors import InteropError
from weft.storage.untrusted import Cursor, map_file

VERSIONS = range(1, 7)
# types in the order of their numbers → numpy's, which lacks bfloat16
TYPES = {"float32": "<f4", "int8": "<i1", "int16": "<i2", "int32": "<i4", "float16": "<f2", "bfloat16": "<i2"}
BY_SIZE = {1: "int8", 2: "int16", 4: "float32"}  # before version 4, a file has only the size of an element
MAX_DIMENSIONS = 8  # of a variable
INT16_SCALE = 1000.0  # of int16 weights without a stored scale, in older files
# words of OpenNMT-tf, each replaced once and in this order
OLD_WORDS = {
    "transformer/": "", ":0": "", "w_embs": "embeddings/weight", "kernel": "weight", "LayerNorm": "layer_norm",
    "dense": "projection", "conv1d_": "linear_", "conv1d": "linear_0",
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A tensor or a setting."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: memoryview


@dataclass(frozen=True)
class ModelFile:
    """A model.bin: its version, the kind of model, and its variables, some of which have several names."""

    path: Path
    version: int
    kind: str
    variables: Mapping[str, Variable]

    def error(self, reason: str) -> InteropError:
        """Return, for the caller to raise, an error that names the file."""
        return InteropError(f"{self.path}: {reason}")

    def __contains__(self, name: str) -> bool:
        return name in self.variables

    def __getitem__(self, name: str) -> Variable:
        if name not in self:
            raise self.error(f"'{name}' is missing")
        return self.variables[name]

    def matrix(self, name: str) -> tuple[int, int]:
        """Shape of a variable that must be a matrix."""
        shape = self[name].shape
        if len(shape) != 2 or 0 in shape:
            raise self.error(f"'{name}' {list(shape)} should be a matrix")
        return shape[0], shape[1]

    def number(self, *names: str, default: float = 0.0) -> float:
        """Value of a setting, under the first of these names that is present."""
        name = next((name for name in names if name in self), None)
        if name is None:
            return default
        if prod(self[name].shape) != 1:
            raise self.error(f"'{name}' {list(self[name].shape)} should be a single number")
        return float(self.tensor(name).flatten()[0])

    def text(self, name: str) -> str:
        """Value of a text setting, which older files store as an array of bytes."""
        try:
            return bytes(self[name].data).rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"'{name}' is not UTF-8 text") from None

    def tensor(self, name: str) -> Tensor:
        """Read a variable; integers with a scale are dequantised, by row for int8 and with one scale for int16."""
        variable, scale_name = self[name], f"{self[name].name}_scale"
        values = torch.from_numpy(np.frombuffer(variable.data, TYPES[variable.dtype]).reshape(variable.shape).copy())
        if variable.dtype == "bfloat16":
            return values.view(torch.bfloat16)
        quantized = variable.dtype in ("int8", "int16") and variable.name.endswith("weight")
        if scale_name not in self and not quantized:
            return values
        if scale_name not in self and variable.dtype == "int8":
            raise self.error(f"'{name}' is int8, but its scale '{scale_name}' is missing")
        scale = self.tensor(scale_name).float() if scale_name in self else torch.tensor(INT16_SCALE)
        if scale.shape not in ((), (1,), values.shape[:1]) or bool((scale == 0).any()):
            raise self.error(f"'{scale_name}' {list(scale.shape)} does not fit '{name}' {list(values.shape)}")
        return values.float() / (scale[:, None] if scale.shape == values.shape[:1] and values.dim() == 2 else scale)


def open_file(path: Path) -> ModelFile:
    """Read the list of a file's variables."""
    cursor = Cursor(path, map_file(path))
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        known = f"it begins with {version}, weft reads {VERSIONS.start} … {VERSIONS[-1]}"
        raise cursor.error(f"not a CTranslate2 model, or of an unknown version: {known}")
    kind, revision = (_string(cursor), cursor.number("I", "the revision")) if version > 1 else ("", 1)
    current = _current_name if revision == 1 else str
    variables: dict[str, Variable] = {}
    for _ in range(cursor.number("I", "the number of variables")):
        name = current(_string(cursor))
        if name in variables:
            raise cursor.error(f"the variable '{name}' appears twice")
        variables[name] = _variable(cursor, name, version)
    aliases: dict[str, Variable] = {}
    for _ in range(cursor.number("I", "the number of aliases") if version >= 3 else 0):
        alias, name = current(_string(cursor)), current(_string(cursor))
        if name not in variables or alias in variables:
            raise cursor.error(f"'{alias}' is an alias of '{name}', which is not a variable")
        aliases[alias] = variables[name]
    if cursor.left:
        raise cursor.error(f"{cursor.left} bytes follow the end of the model")
    return ModelFile(path, version, kind=kind, variables=variables | aliases)


def _string(cursor: Cursor) -> str:
    start, size = cursor.offset, cursor.number("H", "a name")
    try:
        return bytes(cursor.take(size, "a name")).rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError:
        raise cursor.error(f"the name at byte {start} is not UTF-8 text") from None


def _current_name(name: str) -> str:
    for old, new in OLD_WORDS.items():
        name = name.replace(old, new, 1)
    if "encoder" in name:
        return name.replace("multi_head", "self_attention", 1)
    return name.replace("masked_multi_head", "self_attention", 1).replace("multi_head", "attention", 1)


def _variable(cursor: Cursor, name: str, version: int) -> Variable:
    what = f"'{name}'"
    dimensions = cursor.number("B", what)
    if dimensions > MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions; expected {MAX_DIMENSIONS} at most")
    shape = tuple(cursor.number("I", what) for _ in range(dimensions))
    kind, count = cursor.number("B", what), cursor.number("I", what)
    known = dict(enumerate(TYPES)) if version >= 4 else BY_SIZE
    if kind not in known:
        raise cursor.error(f"{what} is of type {kind}; weft reads {', '.join(TYPES)}")
    size = count if version >= 4 else count * kind
    if size != prod(shape) * np.dtype(TYPES[known[kind]]).itemsize:
        raise cursor.error(f"{what} {list(shape)} of {known[kind]} does not fill its {size} bytes")
    return Variable(name, shape, dtype=known[kind], data=cursor.take(size, what))
