"""Arrays of tokens on disk: hashed as they are written, mapped into memory, and held against their checksums once.

That a file is what was written is noted beside it, in `.verified.json`, with what the system says of the file (size,
times, number): a file of which that is still true isn't read again. Where the folder can't be written, files are read
each time.
"""

import hashlib
import json
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from weft.errors import DataError
from weft.files import THREADS, write_text
from weft.progress import Advance, bar

Array = npt.NDArray[Any]
NOTE = ".verified.json"
BLOCK = 1 << 20  # bytes read at once
# a file that changed so shortly ago may change again without another time: some systems keep whole seconds
SETTLED = 2.0


class HashedStream:
    """A file that is written from its beginning to its end; `sha256` is that of all that was written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest = stream, hashlib.sha256()

    def write(self, raw: bytes) -> None:
        self._digest.update(raw)
        self._stream.write(raw)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def mapped(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], begin: int = 0, scattered: bool = False) -> Array:
    """An array in a file, from the byte `begin` on, read as it is used; `scattered`: here and there."""
    if 0 in shape:  # nothing can't be mapped
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "r", begin, shape)
    if scattered and hasattr(mmap, "MADV_RANDOM"):  # else the system reads megabytes around every place
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array.view(np.ndarray)  # slices of a memmap cost ten times as much


def verify(folder: Path, expected: Mapping[str, str], blocks: Callable[[Path], Iterable[bytes]] | None = None) -> None:
    """Refuse a folder in which a file is not the one that its checksum (SHA-256, by its name) was taken of.

    `blocks` are the bytes that a file's checksum is of; by default they are all of its own.
    """
    stamps = {name: _stamp(folder / name) for name in expected}
    try:
        noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        noted = {}
    noted = noted if isinstance(noted, dict) else {}
    unread = [name for name, sha in expected.items() if noted.get(name) != [*stamps[name], sha]]
    if not unread:
        return
    total = sum(stamps[name][0] for name in unread)
    with bar("verifying", total, unit="bytes") as advance, ThreadPoolExecutor(THREADS, "verify") as pool:
        found = pool.map(lambda name: sha256((blocks or file_blocks)(folder / name), advance), unread)
        try:
            for name, sha in zip(unread, found, strict=True):
                if sha != expected[name]:
                    raise DataError(f"{folder / name}: damaged: it is not what was written")
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    now = time.time_ns()
    settled = {name: [*stamps[name], expected[name]] for name in expected if stamps[name][1] < now - SETTLED * 1e9}
    if settled:
        with suppress(OSError):
            write_text(folder / NOTE, json.dumps({**noted, **settled}, indent=1) + "\n")


def file_blocks(path: Path) -> Iterable[bytes]:
    """The bytes of a file."""
    with open(path, "rb", buffering=0) as file:
        yield from iter(lambda: file.read(BLOCK), b"")


def sha256(blocks: Iterable[bytes], advance: Advance = lambda size: None) -> str:
    """The checksum of these bytes; `advance` gets their sizes."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    """What changes when a file does: its size, its times, its number on the disk."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: damaged: not a file")
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
