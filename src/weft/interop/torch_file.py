"""Read files of torch.save as data: tensors, dictionaries, lists and plain values, and nothing else.

A file is a pickle, a program that builds objects, and the values of its tensors. `_run` interprets the few operations
that torch.save writes, and the only thing it can call is the construction of a dense tensor over the mapped file.
`torch.load(weights_only=True)` is not used because it bounds neither memory nor time: it calls `bytearray` with any
size, and hashes keys of nested tuples. Since torch 1.6 a file is a zip archive without compression; older files are
four pickles (magic number, version, sizes of the machine, objects), a list of storage keys, and the values.
"""

import pickletools
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.storage.tensors import NAMES, StoredTensor
from weft.storage.untrusted import bound, map_file, refuse_beyond

MAX_PICKLE_BYTES = 1 << 21  # of the program; GPT-2 XL with its optimizer has a tenth of it
MAX_DIMENSIONS = 64  # of a tensor
MAX_NAMES = 4  # of one tensor in a file: T5 stores its embedding under four names
OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of files written before torch 1.6
LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name
# what interpreting a damaged file can raise; a bug in this module raises other errors
DAMAGE = (zipfile.BadZipFile, struct.error, OSError, EOFError, LookupError, ValueError, RuntimeError, OverflowError)

STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
DICTIONARY = "collections OrderedDict"
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}


@dataclass(frozen=True)
class OpaqueValue:
    """A class or function of torch, or its result, that is not a dense tensor of plain numbers: its name."""

    name: str


@dataclass(frozen=True)
class StorageKey:
    """A storage of `count` values, stored in the file under `key`."""

    dtype: torch.dtype
    key: str
    count: int


class UnsafeProgramError(Exception):
    """The pickle builds something other than tensors and plain values."""


def read(path: Path) -> Any:
    """Read the object that was saved. Its tensors are the mapped file, read-only: copy them before writing to them."""
    data = map_file(path)
    try:
        return _read_old(data) if bytes(data[: len(OLD)]) == OLD else _read_zip(path, data)
    except UnsafeProgramError:
        why = "it holds more than tensors and plain values, which could run code"
        raise InteropError(f"{path}: refused: {why}; its makers can save the model again as safetensors") from None
    except InteropError as error:
        raise InteropError(f"{path}: {error}") from None
    except DAMAGE:
        raise InteropError(f"{path}: not a file of torch.save, or truncated") from None


def list_tensors(file: Path, tensors: Any = None, max_names: int = MAX_NAMES) -> dict[str, StoredTensor]:
    """List the tensors of a file, or of a dictionary read from it, by name; their values stay on the disk until used.

    All must be dense, and none may claim more values than the file holds; a tensor may have up to `max_names` names.
    """
    tensors = read(file) if tensors is None else tensors
    if not isinstance(tensors, dict) or not tensors:
        raise InteropError(f"{file}: it contains no dictionary of tensors")
    for name, value in tensors.items():
        if not isinstance(name, str) or not name.isprintable():
            raise InteropError(f"{file}: {name!r:.60} is not the name of a tensor")
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            what = getattr(value, "name", None) or str(getattr(value, "dtype", type(value).__name__))
            raise InteropError(f"{file}: '{name}' is {what.replace(' ', '.')}; expected a dense tensor of numbers")
    _check_claims(file, tensors, max_names)
    return {
        name: StoredTensor(file, name, shape=tuple(tensor.shape), dtype=NAMES[tensor.dtype], mapped=tensor)
        for name, tensor in sorted(tensors.items())
    }


def _check_claims(path: Path, tensors: Mapping[str, Tensor], max_names: int) -> None:
    """Refuse tensors that together have more values than their storages: a stride of 0 can repeat one value a billion
    times."""
    claimed: Counter[int] = Counter()  # bytes by storage
    names: Counter[tuple[Any, ...]] = Counter()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        view = (storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        names[view] += 1
        if 1 < names[view] <= max_names:
            continue
        claimed[storage.data_ptr()] += tensor.nbytes
        if claimed[storage.data_ptr()] > storage.nbytes():
            what = f"'{name}' is {list(tensor.shape)}, but the file holds too few values for it"
            raise InteropError(f"{path}: {what}; each tensor needs its own")


def _read_zip(path: Path, data: memoryview) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    if any(entry.compress_type or entry.flag_bits & 1 for entry in entries.values()):
        raise InteropError("its entries are compressed, which torch never does; save it again with torch.save")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise InteropError("its entries overlap")
    (name,) = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    folder = name.removesuffix("data.pkl")
    if f"{folder}byteorder" in entries and bytes(_content(entries[f"{folder}byteorder"], data)) != b"little":
        raise InteropError("its values are big-endian; save it again on another machine")
    refuse_beyond(entries[name].file_size, MAX_PICKLE_BYTES, f"its {name} has {entries[name].file_size:,} bytes")
    storages: dict[str, Tensor] = {}

    def storage(key: StorageKey) -> Tensor:
        if key.key not in storages:
            storages[key.key] = _storage(_content(entries[f"{folder}data/{key.key}"], data), key)
        return storages[key.key]

    return _run(_content(entries[name], data), storage)[0]


def _content(entry: zipfile.ZipInfo, data: memoryview) -> memoryview:
    """Bytes of an uncompressed entry."""
    signature, name, extra = struct.unpack_from("<4s22xHH", data, entry.header_offset)
    start = entry.header_offset + LOCAL_HEADER_BYTES + name + extra
    _check(signature == b"PK\3\4" and entry.file_size == entry.compress_size <= len(data) - start)
    return data[start : start + entry.file_size]


def _storage(content: memoryview, key: StorageKey) -> Tensor:
    _check(len(content) >= key.count * key.dtype.itemsize)
    if not key.count:
        return torch.empty(0, dtype=key.dtype)
    with warnings.catch_warnings(action="ignore"):  # about the buffer being read-only
        return torch.frombuffer(content, dtype=key.dtype, count=key.count)


def _read_old(data: memoryview) -> Any:
    """Read a file of torch before 1.6. Its storages follow the objects: a first run collects them, a second one uses
    them."""
    stored: dict[str, StorageKey] = {}

    def collect(key: StorageKey) -> None:
        stored[key.key] = key

    offset = objects = 0
    for _ in range(4):
        objects = offset
        offset += _run(data[offset:], collect)[1]
    keys, length = _run(data[offset:], collect)
    offset += length
    storages: dict[str, Tensor] = {}
    for key in keys:
        (count,) = struct.unpack_from("<q", data, offset)
        _check(count == stored[key].count)
        storages[key] = _storage(data[offset + 8 :], stored[key])
        offset += 8 + count * stored[key].dtype.itemsize
    return _run(data[objects:], lambda key: storages[key.key])[0]


def _run(code: memoryview, storage: Callable[[StorageKey], Tensor | None]) -> tuple[Any, int]:
    """Interpret a pickle; return the object it builds and the length of the pickle.

    `storage` returns the values of a storage, (count,), or None if they are not available yet.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        values = stack[start:]
        del stack[start:]
        return values

    for operation, argument, position in pickletools.genops(BytesIO(bytes(code[: bound(MAX_PICKLE_BYTES)]))):
        match operation.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop(), (position or 0) + 1
            case "MARK":
                marks.append(len(stack))
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name if name in LITERALS:
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if operation.name == "EMPTY_DICT" else [])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(operation.name[-1])
                _check(len(stack) >= count)
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND" | "APPENDS":
                values = pop_to_mark() if operation.name == "APPENDS" else [stack.pop()]
                _typed(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = pop_to_mark() if operation.name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                for key, value in zip(values[::2], values[1::2], strict=True):
                    # no tuples as keys: hashing nested ones can take exponential time
                    _typed(stack[-1], dict)[_typed(key, str | int)] = value
            case "GLOBAL":
                stack.append(_global(argument))
            case "BINPERSID":
                stack.append(_storage_key(stack.pop()))
            case "REDUCE":
                arguments, function = _typed(stack.pop(), tuple), stack.pop()
                stack.append(_call(function, arguments, storage))
            case "BUILD":  # attributes of a dictionary, which are not used
                stack.pop()
                _typed(stack[-1], dict)
            case _:
                raise UnsafeProgramError
    raise ValueError


def _call(function: Any, arguments: tuple[Any, ...], storage: Callable[[StorageKey], Tensor | None]) -> Any:
    """Result of a call; only constructors of dictionaries and dense tensors are really called."""
    if not isinstance(function, OpaqueValue):
        raise UnsafeProgramError
    if function.name == DICTIONARY and not arguments:
        return {}
    if function.name == PARAMETER:
        return _typed(arguments[0], Tensor | OpaqueValue)
    if function.name != TENSOR:
        return OpaqueValue(function.name)
    key, offset, shape, strides = arguments[:4]
    if isinstance(key, OpaqueValue):
        return key
    values = storage(_typed(key, StorageKey))
    if values is None:
        return OpaqueValue("not yet read")
    sizes = (offset, *_typed(shape, tuple), *_typed(strides, tuple))
    _check(len(shape) == len(strides) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 63 for n in sizes))
    return torch.as_strided(values, shape, strides, offset)  # raises if the storage is too small


def _check(valid: bool) -> None:
    if not valid:
        raise ValueError


def _typed(value: Any, kind: Any) -> Any:
    """Return the value if it has the type that torch.save would write here; otherwise raise ValueError."""
    _check(isinstance(value, kind))
    return value


def _global(argument: Any) -> OpaqueValue | torch.dtype:
    """Resolve a name without importing anything; names outside torch are refused."""
    module, name = str(argument).split(" ")
    if module == "torch" and name in STORAGES:
        return STORAGES[name]
    if argument == DICTIONARY or module.split(".")[0] == "torch":
        return OpaqueValue(f"{module} {name}")
    raise UnsafeProgramError


def _storage_key(persistent_id: Any) -> StorageKey | OpaqueValue:
    kind, dtype, key, _, count = _typed(persistent_id, tuple)[:5]
    _check(kind == "storage" and isinstance(key, str) and type(count) is int and count >= 0)
    return StorageKey(dtype, key, count) if isinstance(dtype, torch.dtype) else _typed(dtype, OpaqueValue)
