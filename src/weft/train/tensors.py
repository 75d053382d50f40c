"""Tensors in files: written so that they read back, hashed, and read as fast as the disk gives them.

Loading runs no code: safetensors only.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import RunError

PIECE = 1 << 25  # bytes that one thread hashes, or sends to a GPU, at a time
THREADS = min(16, os.cpu_count() or 1)


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write, sync, read back and compare: what cannot be read must not replace what can."""
    save_file(dict(tensors), path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    for name, written in each(path):
        if tensors[name].numel() and not torch.equal(_bits(written), _bits(tensors[name])):
            raise OSError(f"{path.name} does not read back as it was written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def checksums(path: Path) -> list[str]:
    """The SHA-256 of each 32 MiB of a file: several threads hash a large one, and damage is known by its place."""
    size = path.stat().st_size

    def one(start: int) -> str:
        digest, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), min(PIECE, size - start)
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[:left])):
                digest.update(buffer[:count])
                left -= count
        return digest.hexdigest()

    starts = range(0, max(1, size), PIECE)
    if len(starts) == 1:
        return [one(0)]
    with ThreadPoolExecutor(THREADS, "hash") as pool:
        return list(pool.map(one, starts))


def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as pages of it that are read when they are used."""
    return dict(each(path))


def each(path: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one by one; on a processor they are the file's own pages until they are written to."""
    device = torch.device(device)
    try:
        with safe_open(path, "pt") as file:  # refuses a file that is not what it says
            names = list(file.keys())
            if device.type == "cuda":
                yield from _sent(path, {name: file.get_tensor(name) for name in names}, device)
                return
            for name in names:
                yield name, file.get_tensor(name).to(device)
    except (SafetensorError, OSError, RuntimeError) as error:  # torch maps files, and may lack the room for it
        raise RunError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def _sent(path: Path, pages: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors on a GPU. Each of several threads reads a piece into memory that the GPU can fetch from, and sends
    it on its way while the others read: copies from pages that the file was mapped to would wait for each of them.
    """
    with open(path, "rb") as file:
        offset = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(offset))
        own = threading.local()

        def send(target: Tensor, start: int) -> None:
            if not hasattr(own, "buffer"):
                own.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
                own.stream = torch.cuda.Stream(device)
            piece = own.buffer[: len(target)]
            view, done = memoryview(piece.numpy()), 0
            while done < len(target):
                count = os.preadv(file.fileno(), [view[done:]], start + done)
                if not count:
                    raise OSError("it ends too early")
                done += count
            with torch.cuda.stream(own.stream):
                target.copy_(piece, non_blocking=True)
            own.stream.synchronize()  # the buffer is needed again

        tensors = {name: torch.empty(page.shape, dtype=page.dtype, device=device) for name, page in pages.items()}
        torch.cuda.current_stream(device).synchronize()  # their memory may have been others' a moment ago
        with ThreadPoolExecutor(THREADS, "send") as pool:
            jobs = {
                name: [
                    pool.submit(send, part, 8 + offset + header[name]["data_offsets"][0] + number * PIECE)
                    for number, part in enumerate(_bits(tensor).split(PIECE))
                ]
                for name, tensor in tensors.items()
            }
            for name, tensor in tensors.items():
                for job in jobs[name]:
                    job.result()
                yield name, tensor


def common_type(path: Path) -> torch.dtype:
    """The type that most numbers in a file have."""
    numbers: dict[torch.dtype, int] = {}
    for _, tensor in each(path):  # pages of the file that nobody reads cost nothing
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + tensor.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])
