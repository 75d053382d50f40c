"""Tensors in files: written so that they read back, hashed, and read as fast as the disk gives them.

Loading runs no code: safetensors only.
"""

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft import files
from weft.errors import DamageError, RunError
from weft.safetensors_header import Place, read_header


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, sync, read back and compare: what cannot be read must not replace what can."""
    save_file(dict(tensors), path)
    files.sync_path(path)
    for name, written in each(path):
        if tensors[name].numel() and not torch.equal(_bits(written), _bits(tensors[name])):
            raise OSError(f"{path.name} does not read back as it was written")


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


NAMES = {dtype: name for name, dtype in DTYPES.items()}


def reserve(path: Path, wanted: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
    """Lay out a file of tensors whose numbers are written later; until then they are 0."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in sorted(wanted.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
        begin, end = end, end + dtype.itemsize * shape.numel()
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of their size
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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
    """The error for a piece of a file that was changed."""
    begin, end = number * files.CHECKSUM_BYTES, (number + 1) * files.CHECKSUM_BYTES
    try:
        hit = [name for name, place in _places(path) if place.begin < end and place.end > begin]
    except (OSError, ValueError):  # no tensors in it, or its header was hit
        hit = []
    where = f" in {hit[0]}" if len(hit) == 1 else f" between {hit[0]} and {hit[-1]}" if hit else ""
    return DamageError(f"{path}: the checksum is wrong{where}; the checkpoint is damaged")


def _places(path: Path) -> list[tuple[str, Place]]:
    """The tensors of a safetensors file as they follow each other."""
    return list(read_header(path).tensors.items())


def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as pages of it that are read when they are used."""
    return dict(each(path))


def each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one by one; they are the file's own pages until they are written to."""
    try:
        with safe_open(path, "pt") as file:  # refuses a file that is not what it says
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise DamageError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    except (OSError, RuntimeError) as error:
        # torch maps files, and may lack the memory for it: an older checkpoint won't help
        raise RunError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def placed(path: Path, device: torch.device, sums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file on `device`, each once the bytes around it are known to be those that were hashed."""
    if device.type == "cuda":
        yield from _sent(path, device, sums)
        return
    check(path, sums)
    for name, tensor in each(path):
        yield name, tensor.to(device)


def _sent(path: Path, device: torch.device, sums: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on a GPU. The file is read once: each of several threads reads a piece into memory that the GPU can
    fetch from, hashes it, and sends it on its way while the others read. Copies from the pages of a mapped file would
    wait for each of them.
    """
    tensors = {name: torch.empty(page.shape, dtype=page.dtype, device=device) for name, page in each(path)}
    torch.cuda.current_stream(device).synchronize()  # their memory may have been others' a moment ago
    targets = {name: _bits(tensor) for name, tensor in tensors.items()}
    places, size, own = _places(path), path.stat().st_size, threading.local()
    begins = [place.begin for _, place in places]
    if len(sums) != -(-size // files.CHECKSUM_BYTES):
        raise _damage(path, len(sums))

    def send(number: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(files.CHECKSUM_BYTES, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(device)
        begin = number * files.CHECKSUM_BYTES
        piece = own.buffer[: min(files.CHECKSUM_BYTES, size - begin)]
        view = memoryview(piece.numpy())
        if not _read_into(view, file.fileno(), begin) or hashlib.sha256(view).hexdigest() != sums[number]:
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


def _read_into(view: memoryview, file: int, begin: int) -> bool:
    """Fill `view` with what a file holds from `begin` on; whether there was so much."""
    done = 0
    while done < len(view) and (count := os.preadv(file, [view[done:]], begin + done)):
        done += count
    return done == len(view)


def common_type(path: Path) -> torch.dtype:
    """The type that most numbers in a file have."""
    numbers: dict[torch.dtype, int] = {}
    for _, tensor in each(path):  # pages of the file that nobody reads cost nothing
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + tensor.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])
