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
from weft.untrusted import bound, mapped, refuse_beyond

LARGEST = 1 << 21  # bytes of the pickle; that of GPT-2 XL with its optimizer has a tenth
OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files begin that torch wrote before version 1.6
LOCAL_HEADER = 30  # bytes before the name of a zip entry
DIMENSIONS = 64

STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
TABLES = {"collections OrderedDict"}
TENSORS = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}


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
    data = mapped(path)
    try:
        if bytes(data[: len(OLD)]) == OLD:
            return _old(data)
        return _zipped(path, data)
    except RefusedError:
        raise InteropError(
            f"{path}: refused: it holds more than tensors and plain values, which could run code; its makers can save "
            "the model again as safetensors"
        ) from None
    except InteropError as error:
        raise InteropError(f"{path}: {error}") from None
    except Exception:  # a damaged program fails in as many ways as there are operations
        raise InteropError(f"{path}: not a file of torch.save, or truncated") from None


def check_claims(path: Path, tensors: Mapping[str, Tensor], names: int = 1) -> None:
    """Refuse tensors that take more numbers than the file holds: one number for millions costs nothing there.

    Each tensor needs numbers of its own; `names` is how many names the whole of one may have.
    """
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
            raise InteropError(
                f"{path}: '{name}' is {list(tensor.shape)}, but the file holds too few numbers for it; "
                "each tensor needs its own"
            )


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
    refuse_beyond(entries[name].file_size, LARGEST, f"its {name} has {entries[name].file_size:,} bytes")
    storages: dict[str, Tensor] = {}

    def storage(wanted: _Storage) -> Tensor:
        if wanted.key not in storages:
            numbers = _entry(entries[f"{folder}data/{wanted.key}"], data)
            storages[wanted.key] = _array(numbers, wanted)
        return storages[wanted.key]

    return _Program(_entry(entries[name], data), storage).run()[0]


def _entry(entry: zipfile.ZipInfo, data: memoryview) -> memoryview:
    """The bytes of an entry, which are in the file as they are."""
    start = entry.header_offset
    mark, name, extra = struct.unpack_from("<4s22xHH", data, start)
    start += LOCAL_HEADER + name + extra
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

    def note(wanted: _Storage) -> Tensor:
        sizes[wanted.key] = wanted
        return torch.empty(0, dtype=wanted.dtype).expand(0)

    place = 0
    for _ in range(3):
        place += _Program(data[place:], note).run()[1]
    objects = place
    place += _Program(data[place:], note, dry=True).run()[1]
    keys, length = _Program(data[place:], note).run()
    place += length
    storages: dict[str, Tensor] = {}
    for key in keys:
        count = struct.unpack_from("<q", data, place)[0]
        wanted = sizes[key]
        if count != wanted.count:
            raise ValueError
        storages[key] = _array(data[place + 8 :], wanted)
        place += 8 + count * wanted.dtype.itemsize
    return _Program(data[objects:], lambda wanted: storages[wanted.key]).run()[0]


class _Program:
    """A pickle, followed operation by operation."""

    def __init__(self, code: memoryview, storage: Callable[[_Storage], Tensor], dry: bool = False) -> None:
        self.code, self.storage, self.dry = code, storage, dry

    def run(self) -> tuple[Any, int]:
        """What the program makes, and its length."""
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}
        stream = BytesIO(bytes(self.code[: bound(LARGEST)]))

        def marked() -> list[Any]:
            place = marks.pop()
            values = stack[place:]
            del stack[place:]
            return values

        for operation, argument, place in pickletools.genops(stream):
            match operation.name:
                case "PROTO":
                    pass
                case "STOP":
                    return stack.pop(), (place or 0) + 1
                case "MARK":
                    marks.append(len(stack))
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(operation.name == "NEWTRUE")
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINSTRING":
                    stack.append(argument)
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(operation.name[-1])
                    stack[-count:] = [tuple(stack[-count:])] if len(stack) >= count else _fail()
                case "TUPLE":
                    values = marked()
                    stack.append(tuple(values))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "APPEND":
                    value = stack.pop()
                    _of(stack[-1], list).append(value)
                case "APPENDS":
                    values = marked()
                    _of(stack[-1], list).extend(values)
                case "SETITEM":
                    values = [stack.pop(), stack.pop()][::-1]
                    _set(stack[-1], values)
                case "SETITEMS":
                    values = marked()
                    _set(stack[-1], values)
                case "GLOBAL":
                    stack.append(_global(argument))
                case "BINPERSID":
                    stack.append(_persistent(stack.pop()))
                case "REDUCE":
                    arguments, function = _of(stack.pop(), tuple), stack.pop()
                    stack.append(self._call(function, arguments))
                case "BUILD":  # attributes of a table, which say nothing
                    stack.pop()
                    _of(stack[-1], dict)
                case _:
                    raise RefusedError
        raise ValueError

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if not isinstance(function, Other):
            raise RefusedError
        if function.name in TABLES and not arguments:
            return {}
        if function.name == "torch._utils _rebuild_parameter":
            return _of(arguments[0], Tensor | Other)
        if function.name != "torch._utils _rebuild_tensor_v2":
            return Other(function.name)
        storage, offset, shape, strides = arguments[:4]
        if isinstance(storage, Other):
            return storage
        if self.dry:
            self.storage(_of(storage, _Storage))
            return Other("unread")
        return _tensor(self.storage(_of(storage, _Storage)), offset, shape, strides)


def _fail() -> Any:
    raise ValueError


def _of(value: Any, kind: Any) -> Any:
    """The value, which must be of a kind: operations on another one are none that torch writes."""
    return value if isinstance(value, kind) else _fail()


def _set(table: Any, values: list[Any]) -> None:
    """Put keys and values into a table. Keys are plain: to hash one made of others may take for ever."""
    for key, value in zip(values[::2], values[1::2], strict=True):
        _of(table, dict)[_of(key, str | int)] = value


def _global(argument: Any) -> Other | torch.dtype:
    """What a name of Python's stands for. Nothing is imported."""
    module, name = str(argument).split(" ")
    if module == "torch" and name in STORAGES:
        return STORAGES[name]
    if f"{module} {name}" in TABLES | TENSORS or module.split(".")[0] == "torch":
        return Other(f"{module} {name}")
    raise RefusedError


def _persistent(given: Any) -> _Storage | Other:
    """Which numbers of the file are meant."""
    kind, dtype, key, _, count = _of(given, tuple)[:5]
    if kind != "storage" or not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError
    return _Storage(dtype, key, count) if isinstance(dtype, torch.dtype) else _of(dtype, Other)


def _tensor(storage: Tensor, offset: Any, shape: Any, strides: Any) -> Tensor:
    sizes = (offset, *_of(shape, tuple), *_of(strides, tuple))
    if len(shape) != len(strides) or len(shape) > DIMENSIONS or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError
    return torch.as_strided(storage, shape, strides, offset)  # which checks that all of it is there
