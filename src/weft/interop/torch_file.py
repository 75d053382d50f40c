"""Files of torch.save, read as data: no object is made of them but tensors, tables, lists and plain values.

A file is a pickle, a program that builds objects, and the numbers of the tensors. The program is followed here step by
step, over the few operations that torch.save writes, with nothing that it could call but the making of a tensor. Since
version 1.6 a file is a zip archive, whose entries torch never compresses; older ones are four pickles (two marks, the
machine's sizes, the objects), a list of names, and the numbers.
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

MAX_PICKLE_BYTES = 1 << 21  # the pickle of GPT-2 XL with its optimizer has a tenth
MAX_DIMENSIONS = 64
NAMES_OF_ONE = 4  # that a tensor may have in a file: T5's one table has four
OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files begin that torch wrote before version 1.6
LOCAL_HEADER_BYTES = 30  # before the name of a zip entry

STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
TABLE = "collections OrderedDict"
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
PLAIN = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}


@dataclass(frozen=True)
class Other:
    """A tensor, or what belongs to one, that is no dense array of plain numbers: its name in torch."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Numbers of a type; `key` names them in the file."""

    dtype: torch.dtype
    key: str
    count: int


class RefusedError(Exception):
    """The file asks for something else than tensors and plain values."""


def read(path: Path) -> Any:
    """What a file holds. Its tensors are the file's own pages: copy them before they are written to."""
    data = map_file(path)
    try:
        return _old(data) if bytes(data[: len(OLD)]) == OLD else _zipped(path, data)
    except RefusedError:
        why = "it holds more than tensors and plain values, which could run code"
        raise InteropError(f"{path}: refused: {why}; its makers can save the model again as safetensors") from None
    except InteropError as error:
        raise InteropError(f"{path}: {error}") from None
    except Exception:  # a damaged program fails in as many ways as there are operations
        raise InteropError(f"{path}: not a file of torch.save, or truncated") from None


def list_tensors(file: Path, table: Any = None, names: int = NAMES_OF_ONE) -> dict[str, StoredTensor]:
    """Every tensor of a file, or of a table in it; their numbers stay on the disk until they are used.

    Each is dense and has numbers of its own; `names` is how many names the whole of one may have.
    """
    table = read(file) if table is None else table
    if not isinstance(table, dict) or not table:
        raise InteropError(f"{file}: it holds no table of tensors")
    for name, value in table.items():
        if not isinstance(name, str) or not name.isprintable():
            raise InteropError(f"{file}: {name!r:.60} is not the name of a tensor")
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            what = getattr(value, "name", None) or str(getattr(value, "dtype", type(value).__name__))
            raise InteropError(f"{file}: '{name}' is {what.replace(' ', '.')}; expected a dense tensor of numbers")
    _check_claims(file, table, names)
    return {name: StoredTensor(file, name, tuple(t.shape), NAMES[t.dtype], t) for name, t in sorted(table.items())}


def _check_claims(path: Path, tensors: Mapping[str, Tensor], names: int) -> None:
    """Refuse tensors that take more numbers than the file holds: one number for millions costs nothing there."""
    claimed: Counter[int] = Counter()  # bytes of each storage that tensors have used
    named: Counter[tuple[Any, ...]] = Counter()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        view = (storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        named[view] += 1
        if 1 < named[view] <= names:
            continue
        claimed[storage.data_ptr()] += tensor.nbytes
        if claimed[storage.data_ptr()] > storage.nbytes():
            what = f"'{name}' is {list(tensor.shape)}, but the file holds too few numbers for it"
            raise InteropError(f"{path}: {what}; each tensor needs its own")


def _zipped(path: Path, data: memoryview) -> Any:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    packed = next((entry for entry in entries.values() if entry.compress_type or entry.flag_bits & 1), None)
    if packed is not None:
        raise InteropError("its parts are compressed, as torch never writes them; save it again with torch.save")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise InteropError("its parts overlap")
    (name,) = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    folder = name.removesuffix("data.pkl")
    if f"{folder}byteorder" in entries and bytes(_entry(entries[f"{folder}byteorder"], data)) != b"little":
        raise InteropError("its numbers are big-endian; save it again on another machine")
    refuse_beyond(entries[name].file_size, MAX_PICKLE_BYTES, f"its {name} has {entries[name].file_size:,} bytes")
    storages: dict[str, Tensor] = {}

    def storage(wanted: _Storage) -> Tensor:
        if wanted.key not in storages:
            storages[wanted.key] = _array(_entry(entries[f"{folder}data/{wanted.key}"], data), wanted)
        return storages[wanted.key]

    return _run(_entry(entries[name], data), storage)[0]


def _entry(entry: zipfile.ZipInfo, data: memoryview) -> memoryview:
    """The bytes of an entry, which are in the file as they are."""
    start = entry.header_offset
    mark, name, extra = struct.unpack_from("<4s22xHH", data, start)
    start += LOCAL_HEADER_BYTES + name + extra
    if mark != b"PK\3\4" or entry.file_size != entry.compress_size or entry.file_size > len(data) - start:
        raise ValueError
    return data[start : start + entry.file_size]


def _array(numbers: memoryview, wanted: _Storage) -> Tensor:
    if len(numbers) < wanted.count * wanted.dtype.itemsize:
        raise ValueError
    if not wanted.count:
        return torch.empty(0, dtype=wanted.dtype)
    with warnings.catch_warnings(action="ignore"):  # that they are not to be written to
        return torch.frombuffer(numbers, dtype=wanted.dtype, count=wanted.count)


def _old(data: memoryview) -> Any:
    """The numbers come after the objects: a first reading says which there are, a second one uses them."""
    sizes: dict[str, _Storage] = {}

    def note(wanted: _Storage) -> None:
        sizes[wanted.key] = wanted

    place = objects = 0
    for _ in range(4):
        objects = place
        place += _run(data[place:], note)[1]
    keys, length = _run(data[place:], note)
    place += length
    storages: dict[str, Tensor] = {}
    for key in keys:
        count, wanted = struct.unpack_from("<q", data, place)[0], sizes[key]
        if count != wanted.count:
            raise ValueError
        storages[key] = _array(data[place + 8 :], wanted)
        place += 8 + count * wanted.dtype.itemsize
    return _run(data[objects:], lambda wanted: storages[wanted.key])[0]


def _run(code: memoryview, storage: Callable[[_Storage], Tensor | None]) -> tuple[Any, int]:
    """Follow a pickle operation by operation: what it makes, and its length.

    `storage` gives the numbers of a tensor, or None where they are not read yet.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def marked() -> list[Any]:
        place = marks.pop()
        values = stack[place:]
        del stack[place:]
        return values

    for operation, argument, place in pickletools.genops(BytesIO(bytes(code[: bound(MAX_PICKLE_BYTES)]))):
        match operation.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop(), (place or 0) + 1
            case "MARK":
                marks.append(len(stack))
            case name if name in PLAIN:
                stack.append(PLAIN[name])
            case name if name in VALUES:
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if operation.name == "EMPTY_DICT" else [])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(operation.name[-1])
                stack[-count:] = [tuple(stack[-count:])] if len(stack) >= count else _fail()
            case "TUPLE":
                stack.append(tuple(marked()))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND" | "APPENDS":
                values = marked() if operation.name == "APPENDS" else [stack.pop()]
                _of(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = marked() if operation.name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                for key, value in zip(values[::2], values[1::2], strict=True):
                    # keys are plain: to hash one made of others may take for ever
                    _of(stack[-1], dict)[_of(key, str | int)] = value
            case "GLOBAL":
                stack.append(_global(argument))
            case "BINPERSID":
                stack.append(_persistent(stack.pop()))
            case "REDUCE":
                arguments, function = _of(stack.pop(), tuple), stack.pop()
                stack.append(_called(function, arguments, storage))
            case "BUILD":  # attributes of a table, which say nothing
                stack.pop()
                _of(stack[-1], dict)
            case _:
                raise RefusedError
    raise ValueError


def _called(function: Any, arguments: tuple[Any, ...], storage: Callable[[_Storage], Tensor | None]) -> Any:
    """What a call makes; nothing is called but what makes a tensor."""
    if not isinstance(function, Other):
        raise RefusedError
    if function.name == TABLE and not arguments:
        return {}
    if function.name == PARAMETER:
        return _of(arguments[0], Tensor | Other)
    if function.name != TENSOR:
        return Other(function.name)
    wanted, offset, shape, strides = arguments[:4]
    if isinstance(wanted, Other):
        return wanted
    numbers = storage(_of(wanted, _Storage))
    if numbers is None:
        return Other("unread")
    sizes = (offset, *_of(shape, tuple), *_of(strides, tuple))
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError
    return torch.as_strided(numbers, shape, strides, offset)  # which checks that all of it is there


def _fail() -> Any:
    raise ValueError


def _of(value: Any, kind: Any) -> Any:
    """The value, which must be of a kind: operations on another one are none that torch writes."""
    return value if isinstance(value, kind) else _fail()


def _global(argument: Any) -> Other | torch.dtype:
    """What a name of Python's stands for. Nothing is imported."""
    module, name = str(argument).split(" ")
    if module == "torch" and name in STORAGES:
        return STORAGES[name]
    if argument == TABLE or module.split(".")[0] == "torch":
        return Other(f"{module} {name}")
    raise RefusedError


def _persistent(given: Any) -> _Storage | Other:
    kind, dtype, key, _, count = _of(given, tuple)[:5]
    if kind != "storage" or not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError
    return _Storage(dtype, key, count) if isinstance(dtype, torch.dtype) else _of(dtype, Other)
