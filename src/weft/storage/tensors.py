"""Tensors in safetensors files: listed, checked and read without a copy, and written so that they read back.

A file is read as fast as the disk gives it, its tensors as pages of it or straight onto a GPU, or one by one where a
model is larger than the memory. Loading runs no code.
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

from weft.errors import DamageError, InteropError, RunError
from weft.storage import files
from weft.storage.safetensors_header import parse_header, read_header
from weft.storage.untrusted import refuse_pointer

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32", "F64")

LazyWeights = Mapping[str, Callable[[], Tensor]]  # a tensor is read, and converted, when it is asked for


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as they are in a file, (bytes,)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file under its name there, not yet read; of a file of torch.save, the tensor on its `pages`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    pages: Tensor | None = None

    def read(self) -> Tensor:
        """The tensor. Its memory is the file's own pages, freed with it."""
        if self.pages is not None:
            return self.pages.clone(memory_format=torch.contiguous_format)
        with safe_open(self.file, "pt") as opened:
            return opened.get_tensor(self.name)

    def equals(self, other: "Stored") -> bool:
        """Whether two stored tensors hold the same bits."""
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and torch.equal(bits(self.read()), bits(other.read()))


def listing(file: Path) -> dict[str, Stored]:
    """Every tensor of a file that may come from strangers, by name; nothing but its header is read."""
    refuse_pointer(file)
    try:
        places = read_header(file).tensors
    except OSError as error:
        raise InteropError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InteropError(f"{file}: not a whole safetensors file: {error}") from None
    for name, place in places.items():
        if place.dtype not in DTYPES:
            raise InteropError(f"{file}: '{name}' holds numbers of type {place.dtype}; weft reads {', '.join(DTYPES)}")
    return {name: Stored(file, name, place.shape, place.dtype) for name, place in sorted(places.items())}


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
            begin, end, sizes[name] = end, end + tensor.nbytes, tensor.element_size()
            misaligned = misaligned or begin % sizes[name] != 0
            header[name] = _entry(tensor.dtype, tensor.shape, begin, end)
            file.write(bits(tensor).numpy().data)
            del tensor
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= reserved, "a tensor has more dimensions than space was reserved for"
        file.seek(0)
        file.write(reserved.to_bytes(8, "little") + text.ljust(reserved))
        files.sync(file)
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
            file.write(bits(tensor).numpy().data)
        files.sync(file)


def reserve(path: Path, wanted: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
    """Lay out a file of tensors whose numbers are written later; until then they are 0."""
    header, end = {}, 0
    for name, (dtype, shape) in sorted(wanted.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
        begin, end = end, end + dtype.itemsize * shape.numel()
        header[name] = _entry(dtype, shape, begin, end)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of their size
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _entry(dtype: torch.dtype, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, sync, read back and compare: what cannot be read must not replace what can."""
    save_file(dict(tensors), path)
    files.sync_path(path)
    for name, written in each(path):
        if tensors[name].numel() and not torch.equal(bits(written), bits(tensors[name])):
            raise OSError(f"{path.name} does not read back as it was written")


def each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one by one; they are the file's own pages until they are written to."""
    try:
        files.open_regular(path).close()
        with safe_open(path, "pt") as file:  # refuses a file that is not what it says
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise DamageError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except (OSError, RuntimeError) as error:
        # torch maps files, and may lack the memory for it: an older checkpoint won't help
        raise RunError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as pages of it that are read when they are used."""
    return dict(each(path))


def common_type(path: Path) -> torch.dtype:
    """The type that most numbers in a file have."""
    numbers: Counter[torch.dtype] = Counter()
    for _, tensor in each(path):  # pages of the file that nobody reads cost nothing
        numbers[tensor.dtype] += tensor.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])


def check(path: Path, sums: Sequence[str]) -> None:
    """Refuse a file whose `checksums` are others, or that can't be read, and tell which of its tensors were hit."""
    try:
        found = files.checksums(path)
    except OSError as error:
        raise DamageError(f"{path}: cannot be read: {error.strerror}") from None
    for number, (own, expected) in enumerate(zip_longest(found, sums)):
        if own != expected:
            raise _damage(path, number)


def _damage(path: Path, number: int) -> DamageError:
    begin, end = number * files.CHECKSUM_BYTES, (number + 1) * files.CHECKSUM_BYTES
    try:
        hit = [name for name, place in read_header(path).tensors.items() if place.begin < end and place.end > begin]
    except (OSError, ValueError):  # no tensors in it, or its header was hit
        hit = []
    place = f" in {hit[0]}" if len(hit) == 1 else f" between {hit[0]} and {hit[-1]}" if hit else ""
    return DamageError(f"{path}: the checksum is wrong{place}; the checkpoint is damaged")


def placed(path: Path, device: torch.device, sums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file on `device`, each once the bytes around it are known to be those that were hashed."""
    if device.type == "cuda":
        yield from _sent(path, device, sums)
    else:
        check(path, sums)
        yield from ((name, tensor.to(device)) for name, tensor in each(path))


def _sent(path: Path, device: torch.device, sums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on a GPU. The file is read once: each of several threads reads a piece into memory that the GPU can
    fetch from, hashes it, and sends it on its way while the others read. Copies from the pages of a mapped file would
    wait for each of them.
    """
    tensors = {name: torch.empty(page.shape, dtype=page.dtype, device=device) for name, page in each(path)}
    torch.cuda.current_stream(device).synchronize()  # their memory may have been others' a moment ago
    targets = {name: bits(tensor) for name, tensor in tensors.items()}
    places, size, own = list(read_header(path).tensors.items()), path.stat().st_size, threading.local()
    begins = [place.begin for _, place in places]
    if len(sums) != -(-size // files.CHECKSUM_BYTES):
        raise _damage(path, len(sums))

    def send(number: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(files.CHECKSUM_BYTES, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(device)
        begin = number * files.CHECKSUM_BYTES
        piece = own.buffer[: min(files.CHECKSUM_BYTES, size - begin)]
        view, done = memoryview(piece.numpy()), 0
        while done < len(view) and (count := os.preadv(file.fileno(), [view[done:]], begin + done)):
            done += count
        if done < len(view) or hashlib.sha256(view).hexdigest() != sums[number]:
            raise _damage(path, number)
        with torch.cuda.stream(own.stream):
            for name, place in places[max(0, bisect_right(begins, begin) - 1) :]:
                if place.begin >= begin + len(view):
                    break
                first, last = max(place.begin, begin), min(place.end, begin + len(view))
                if first < last:
                    part = piece[first - begin : last - begin]
                    targets[name][first - place.begin : last - place.begin].copy_(part, non_blocking=True)
        own.stream.synchronize()  # the buffer is needed again

    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(files.THREADS, "send") as pool:
        jobs = [pool.submit(send, number) for number in range(len(sums))]
        jobs[0].result()  # the header is what it was
        for name, place in places:
            for job in jobs[place.begin // files.CHECKSUM_BYTES : -(-place.end // files.CHECKSUM_BYTES)]:
                job.result()
            yield name, tensors[name]
