"""Prepared files against their checksums: read once, at the disk's speed, and noted so that it costs once.

The note, `.verified.json` beside the files, holds what the system says of each file (size, times, number): a file of
which that is still true isn't read again. Where the folder can't be written, files are read each time.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.files import THREADS, write_text
from weft.progress import Advance, bar

NOTE = ".verified.json"
BLOCK = 1 << 20
# a file that changed so shortly ago may change again without another time: some systems keep whole seconds
SETTLED = 2.0

Digest = Callable[[Path, Advance], str]


def verify(folder: Path, expected: Mapping[str, str], digest: Digest | None = None) -> None:
    """Refuse a folder in which a file is not the one that its checksum (SHA-256, by its name) was taken of.

    `digest` is how a file's checksum is taken; by default it is that of all its bytes.
    """
    noted, stamps = _noted(folder), {name: _stamp(folder / name) for name in expected}
    unread = [name for name, sha in expected.items() if noted.get(name) != [*stamps[name], sha]]
    if not unread:
        return
    total = sum(stamps[name][0] for name in unread)
    with bar("verifying", total, unit="bytes") as advance, ThreadPoolExecutor(THREADS, "verify") as pool:
        found = pool.map(lambda name: _digest(folder / name, digest or sha256, advance), unread)
        for name, sha in zip(unread, found, strict=True):
            if sha != expected[name]:
                raise DataError(f"{folder / name}: damaged: it is not what was written")
    now = time.time_ns()
    settled = {name: [*stamps[name], expected[name]] for name in expected if stamps[name][1] < now - SETTLED * 1e9}
    if not settled:
        return
    with suppress(OSError):
        write_text(folder / NOTE, json.dumps({**noted, **settled}, indent=1) + "\n")


def sha256(path: Path, advance: Advance) -> str:
    """The checksum of a file's bytes."""
    with open(path, "rb", buffering=0) as file:
        return hexdigest(hashlib.sha256(), iter(lambda: file.read(BLOCK), b""), advance)


def hexdigest(digest: Any, blocks: Iterable[bytes], advance: Advance) -> str:
    """The checksum once these blocks are added; `advance` gets their sizes."""
    for block in blocks:
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()


def _digest(path: Path, digest: Digest, advance: Advance) -> str:
    try:
        return digest(path, advance)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _stamp(path: Path) -> list[int]:
    """What changes when a file does: its size, its times, its number on the disk."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: damaged: not a file")
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _noted(folder: Path) -> dict[str, Any]:
    try:
        noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
