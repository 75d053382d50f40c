"""Files and folders that are whole or absent: written beside their place, synced, renamed. Locks and checksums.

A file that is being written has the name of its place with a dot before it and a few letters behind, and is locked. A
process that is killed leaves it so; nothing reads it, and who writes there next sweeps it away. On systems other than
POSIX a folder cannot be synced, and nothing is locked.
Whatever writes raises OSError where the disk refuses.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from weft.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAX_NOTE_BYTES = 1 << 28  # of what weft notes for itself beside weights and tokens
CHECKSUM_BYTES = 1 << 25  # bytes that have a checksum of their own
THREADS = min(16, os.cpu_count() or 1)
_SURROGATE = re.compile("[\ud800-\udfff]")
_LEFT = re.compile(r"\..+\.[0-9a-f]{8}")  # what is written beside its place, or was taken away from there


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8: bytes that were not, and halves of pairs, are surrogates in it."""
    return _SURROGATE.search(text) is None


def utf8_size(text: str) -> int:
    """The bytes that a text takes in a file."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def open_regular(path: Path) -> BufferedReader:
    """A file to read, which is one: a pipe would be waited for, and a device never ends; OSError says so."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        number, why = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(kind) else (errno.EINVAL, "Not a regular file")
        raise OSError(number, why, str(path))
    return open(handle, "rb")


def read_bytes(path: Path, limit: int = MAX_NOTE_BYTES) -> bytes:
    """The bytes of a regular file of at most `limit` of them."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes, where {limit:,} are the most", str(path))
        return file.read(size)  # not the limit, for which Python would reserve memory


def read_text(path: Path, limit: int = MAX_NOTE_BYTES) -> str:
    """The text of a regular file, in UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def check_place(path: Path) -> None:
    """Refuse, before any work is done, a place where no file can be written; nothing is made there yet."""
    there = path.parent
    while not there.exists() and there != there.parent:  # what is missing will be made
        there = there.parent
    if path.is_dir():
        raise DataError(f"{path}: cannot be written: Is a directory")
    if not there.is_dir():
        raise DataError(f"{path}: cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise DataError(f"{path}: cannot be written: Permission denied")


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step; a reader sees the old file or the new one, never a part."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write (and to read back), which takes the place of `path` when it is whole and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _making(path, Path.touch) as beside, open(beside, "r+b") as file:
        yield file
        sync(file)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path`, missing or empty, when all in it is on the disk."""
    path = Path(os.path.realpath(path))  # `.` has no name, and a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with _making(path, Path.mkdir) as beside:
        yield beside
        for inside in (*beside.rglob("*"), beside):
            if not inside.is_symlink():
                sync_path(inside)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, in one step: there is always either the old link or the new."""
    with _making(path, lambda beside: beside.symlink_to(target)):
        pass


@contextmanager
def _making(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """What `make` makes beside `path`, which is put in its place, or removed where something goes wrong."""
    sweep(path.parent, path.name)
    beside = _beside(path)
    with ExitStack() as stack:
        try:
            make(beside)
            while not (fcntl is None or beside.is_symlink() or stack.enter_context(_kept(beside))):
                make(beside)
            yield beside
            put(beside, path)
        except BaseException:
            _remove(beside)
            raise


@contextmanager
def _kept(path: Path) -> Iterator[bool]:
    """Keep something new from being swept away; False where that has happened already."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        with suppress(OSError):  # some network folders have no locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield path.exists()
    finally:
        os.close(handle)


def put(beside: Path, path: Path) -> None:
    """Rename what was written beside `path`, so that it stays there should the machine stop now."""
    os.replace(beside, path)
    sync_path(path.parent)


def remove_folder(path: Path) -> None:
    """Take a folder away in one step: what is half deleted must not be found in its place."""
    aside = _beside(path)
    put(path, aside)
    _remove(aside)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left beside the places in a folder, or beside one of them; what a process is writing
    there now stays."""
    for left in [path for path in folder.glob(".*") if _LEFT.fullmatch(path.name)]:
        if name is None or left.name[1:-9] == name:
            with suppress(OSError):  # it is locked, or somebody else's
                if fcntl is None or left.is_symlink():
                    _remove(left)
                    continue
                handle = os.open(left, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(left)
                finally:
                    os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(file: IO[Any]) -> None:
    """Wait until all that was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, made if it is missing; it ends with the process, however that ends.

    Raises BlockingIOError where another process has it. Whoever holds it may remove the file.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                yield
                return
        finally:
            os.close(handle)
        # the process that had it has removed the file in between


def _lock(handle: int) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some network folders have no locks; there it is up to the person who starts processes
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file; it is not kept from it."""
    try:
        with open_regular(path) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # there may be no such file
        return isinstance(error, BlockingIOError)


def checksums(path: Path) -> list[str]:
    """The SHA-256 of each 32 MiB of a file: several threads hash a large one, and damage is known by its place."""
    size = path.stat().st_size

    def one(start: int) -> str:
        digest, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), min(CHECKSUM_BYTES, size - start)
        with open_regular(path) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[:left])):
                digest.update(buffer[:count])
                left -= count
        return digest.hexdigest()

    starts = range(0, max(1, size), CHECKSUM_BYTES)
    if len(starts) == 1:
        return [one(0)]
    with ThreadPoolExecutor(THREADS, "hash") as pool:
        return list(pool.map(one, starts))


def cache_folder() -> Path:
    """WEFT_CACHE, or weft's folder in the user's cache."""
    if chosen := os.environ.get("WEFT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "weft"
