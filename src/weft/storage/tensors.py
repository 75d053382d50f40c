"""Tensors in safetensors files: list, verify, memory-map, copy to a GPU, write and read back.

Files can be mapped, streamed to a GPU at the speed of the disk, or read tensor by tensor for models larger than
memory. Loading executes no code.
"""

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import DamageError, InteropError, RunError, os_errors
from weft.storage import files
from weft.storage.safetensors_header import parse_header, read_header
from weft.storage.untrusted import refuse_pointer

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32", "F64")

LazyWeights = Mapping[str, Callable[[], Tensor]]  # a tensor is read, and converted, when its function is called


def byte_view(tensor: Tensor) -> Tensor:
    """Bytes of a tensor in memory order, (bytes,) uint8; a view if the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, not yet read; or, from a file of torch.save, the mapped tensor."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    mapped: Tensor | None = None
    rows: int | None = None  # number of rows to read, if not all

    def read(self) -> Tensor:
        """Return the tensor: backed by the mapped file, or a contiguous copy of `mapped`."""
        if self.mapped is not None:
            return self.mapped[: self.rows].clone(memory_format=torch.contiguous_format)
        with safe_open(self.file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(self.name)
            return tensor if self.rows is None else tensor[: self.rows]

    def equals(self, other: "StoredTensor") -> bool:
        """Return whether two stored tensors have the same shape, dtype and bits."""
        same_type = (self.shape, self.dtype) == (other.shape, other.dtype)
        return same_type and torch.equal(byte_view(self.read()), byte_view(other.read()))


def list_tensors(file: Path) -> dict[str, StoredTensor]:
    """List the tensors of an untrusted file by name; reads the header only."""
    refuse_pointer(file)
    try:
        tensors = read_header(file).tensors
    except OSError as error:
        raise InteropError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InteropError(f"{file}: not a complete safetensors file: {error}") from None
    for name, info in tensors.items():
        if info.dtype not in DTYPES:
            raise InteropError(f"{file}: '{name}' has dtype {info.dtype}; weft reads {', '.join(DTYPES)}")
    return {name: StoredTensor(file, name, shape=t.shape, dtype=t.dtype) for name, t in sorted(tensors.items())}


def write(path: Path, weights: LazyWeights) -> None:
    """Write tensors one after another and sync; at most one of them is in memory.

    Space for the header is reserved, and the header is filled in at the end. A tensor's offset must be a multiple of
    its item size, which is known only once it has been read: if mixed dtypes break that, all tensors are written a
    second time, the widest dtypes first.
    """
    reserved = 64 + sum(len(json.dumps(name)) + 256 for name in weights)  # offsets have at most 20 digits each
    reserved += -reserved % 64
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes: dict[str, int] = {}
    end, misaligned = 0, False
    with open(path, "wb") as file:
        file.seek(8 + reserved)
        for name, make in weights.items():
            tensor = make().detach().cpu()
            begin, end, sizes[name] = end, end + tensor.nbytes, tensor.element_size()
            misaligned = misaligned or begin % sizes[name] != 0
            header[name] = _entry(tensor.dtype, tensor.shape, (begin, end))
            file.write(byte_view(tensor).numpy().data)
            del tensor
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= reserved, "a tensor has more dimensions than space was reserved for"
        file.seek(0)
        file.write(reserved.to_bytes(8, "little") + text.ljust(reserved))
        files.sync(file)
    if misaligned:
        write(path, {name: weights[name] for name in sorted(sizes, key=lambda name: -sizes[name])})


def write_with_header(path: Path, header: str, weights: LazyWeights) -> None:
    """Write tensors under the verbatim header of an imported file and sync: reproduces that file byte for byte."""
    text = header.encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in parse_header(text).tensors.items():
            tensor = weights[name]().detach().cpu()
            if (NAMES[tensor.dtype], tuple(tensor.shape)) != (info.dtype, info.shape):
                raise InteropError(f"{path.name}: '{name}' has another dtype or shape than when it was imported")
            file.write(byte_view(tensor).numpy().data)
        files.sync(file)


def reserve(path: Path, specs: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
    """Lay out a file of zero-filled tensors with these dtypes and shapes; their values are written later."""
    header, end = {}, 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + dtype.itemsize * shape.numel()
        header[name] = _entry(dtype, shape, (begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of their item size
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _entry(dtype: torch.dtype, shape: Sequence[int], offsets: tuple[int, int]) -> dict[str, Any]:
    return {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, sync, read back and compare, so that an unreadable file never replaces a readable one."""
    save_file(dict(tensors), path)
    files.sync_path(path)
    for name, read_back in iterate(path):
        if tensors[name].numel() and not torch.equal(byte_view(read_back), byte_view(tensors[name])):
            raise OSError(f"{path.name} does not read back as it was written")


def iterate(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the memory-mapped (copy-on-write) tensor of each entry of a file."""
    try:
        # the open file, not its path, which may have become a link since it was checked
        with (
            files.open_regular(path) as opened,
            safe_open(files.path_of(opened, path), "pt") as file,
        ):  # checks the header
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise DamageError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except (OSError, RuntimeError) as error:
        # not DamageError: torch may lack the memory to map the file, and then an older checkpoint won't help
        raise RunError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def load(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, memory-mapped."""
    return dict(iterate(path))


def common_dtype(path: Path) -> torch.dtype:
    """Dtype of the largest number of elements in a file."""
    elements: Counter[torch.dtype] = Counter()
    for _, tensor in iterate(path):  # mapped: no values are read
        elements[tensor.dtype] += tensor.numel()
    return max(elements, key=lambda dtype: elements[dtype])


def check(path: Path, checksums: Sequence[str]) -> None:
    """Raise DamageError, naming the damaged tensors, if the file is unreadable or its checksums differ."""
    with os_errors(path, DamageError):
        actual = files.checksums(path)
    for chunk, (checksum, expected) in enumerate(zip_longest(actual, checksums)):
        if checksum != expected:
            raise _damage_in(path, chunk)


def _damage_in(path: Path, chunk: int) -> DamageError:
    begin, end = chunk * files.CHECKSUM_BYTES, (chunk + 1) * files.CHECKSUM_BYTES
    try:
        hit = [name for name, info in read_header(path).tensors.items() if info.begin < end and info.end > begin]
    except (OSError, ValueError):  # not a safetensors file, or the header itself is damaged
        hit = []
    where = f" in {hit[0]}" if len(hit) == 1 else f" between {hit[0]} and {hit[-1]}" if hit else ""
    return DamageError(f"{path}: the checksum is wrong{where}; the checkpoint is damaged")


def load_verified(path: Path, device: torch.device, checksums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors on `device`, each after the checksums of its bytes have been verified."""
    if device.type == "cuda":
        yield from _load_to_gpu(path, device, checksums)
    else:
        check(path, checksums)
        yield from ((name, tensor.to(device)) for name, tensor in iterate(path))


def _load_to_gpu(path: Path, device: torch.device, checksums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Read the file once with several threads: each reads a chunk into pinned memory, hashes it and copies it
    asynchronously. Copying from the mapped file instead would wait for every page.
    """
    tensors = {name: torch.empty(page.shape, dtype=page.dtype, device=device) for name, page in iterate(path)}
    torch.cuda.current_stream(device).synchronize()  # the allocator may have reused memory with kernels in flight
    targets = {name: byte_view(tensor) for name, tensor in tensors.items()}
    infos, size, local = list(read_header(path).tensors.items()), path.stat().st_size, threading.local()
    begins = [info.begin for _, info in infos]
    if len(checksums) != -(-size // files.CHECKSUM_BYTES):
        raise _damage_in(path, len(checksums))

    def copy(chunk: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = torch.empty(files.CHECKSUM_BYTES, dtype=torch.uint8, pin_memory=True)
            local.stream = torch.cuda.Stream(device)
        begin = chunk * files.CHECKSUM_BYTES
        pinned = local.buffer[: min(files.CHECKSUM_BYTES, size - begin)]
        view, done = memoryview(pinned.numpy()), 0
        while done < len(view) and (count := os.preadv(file.fileno(), [view[done:]], begin + done)):
            done += count
        if done < len(view) or hashlib.sha256(view).hexdigest() != checksums[chunk]:
            raise _damage_in(path, chunk)
        with torch.cuda.stream(local.stream):
            for name, info in infos[max(0, bisect_right(begins, begin) - 1) :]:
                if info.begin >= begin + len(view):
                    break
                first, last = max(info.begin, begin), min(info.end, begin + len(view))
                if first < last:
                    source = pinned[first - begin : last - begin]
                    targets[name][first - info.begin : last - info.begin].copy_(source, non_blocking=True)
        local.stream.synchronize()  # the buffer is reused for the next chunk

    with files.open_regular(path) as file, ThreadPoolExecutor(files.THREADS, "copy") as pool:
        copies = [pool.submit(copy, chunk) for chunk in range(len(checksums))]
        copies[0].result()  # verifies the header
        for name, info in infos:
            for done in copies[info.begin // files.CHECKSUM_BYTES : -(-info.end // files.CHECKSUM_BYTES)]:
                done.result()
            yield name, tensors[name]
