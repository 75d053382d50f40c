"""Atomic writes of files and folders (temporary name, sync, rename), file locks and checksums.

While a file is being written, its name is a dot, the final name and a random suffix, and it is locked. A killed process
leaves such a file behind; nothing reads it, and the next writer of the same path removes it. On systems other than
POSIX, folders cannot be synced and nothing is locked.
Functions that write raise OSError when the disk refuses.
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

MAX_NOTE_BYTES = 1 << 28  # size of a file that weft keeps beside weights and tokens, such as config.toml
CHECKSUM_BYTES = 1 << 25  # bytes of a file that share one checksum
THREADS = min(16, os.cpu_count() or 1)  # that read or hash one file
_checked: dict[str, str] = {}  # folders without links out of them, and their real paths
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # names that `_temporary` returns


def is_text(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8, that is, contains no lone surrogates."""
    return _SURROGATE.search(text) is None


def utf8_size(text: str) -> int:
    """Size of a text in bytes, encoded as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError for anything else, because a pipe may block and a device never ends.

    A file of a folder that `link_out` has checked must still lie in it.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status, code, reason = os.fstat(handle), 0, ""
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        code, reason = (errno.EISDIR, "Is a directory") if is_folder else (errno.EINVAL, "Not a regular file")
    elif _lies_elsewhere(path, status):
        code, reason = errno.ELOOP, "A link out of its folder"
    if reason:
        os.close(handle)
        raise OSError(code, reason, str(path))
    return open(handle, "rb")


def path_of(file: IO[Any], path: Path) -> str:
    """Return a path by which a library opens an open file, although a link may have replaced it at `path` meanwhile."""
    opened = f"/dev/fd/{file.fileno()}"
    return opened if os.path.exists(opened) else str(path)


def _lies_elsewhere(path: Path, status: os.stat_result) -> bool:
    """Return whether an opened file lies outside the checked folder that contains its path."""
    absolute = os.path.abspath(path)
    inside = next((_checked[parent] for parent in map(str, Path(absolute).parents) if parent in _checked), None)
    if inside is None:
        return False
    real = os.path.realpath(absolute)
    return not (_contains(inside, real) and os.path.samestat(os.lstat(real), status))


def link_out(folder: Path, root: Path) -> Path | None:
    """Return a link through which a reader of `folder` would leave it, or `folder` if it is one out of `root`.

    Links inside the folder, such as one checkpoint's second name, are no such links; None if there are no others. From
    then on, `open_regular` refuses files of this folder that are replaced by links out of it.
    """
    inside = os.path.realpath(folder)
    if not _contains(os.path.realpath(root), inside):
        return folder
    for parent, folders, names in os.walk(inside):
        for path in (os.path.join(parent, name) for name in (*folders, *names)):
            if os.path.islink(path) and not _contains(inside, os.path.realpath(path)):
                return folder / os.path.relpath(path, inside)
    _checked[os.path.abspath(folder)] = inside
    return None


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def read_bytes(path: Path, limit: int = MAX_NOTE_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes; the limit is {limit:,}", str(path))
        return file.read(size)  # not read(limit), for which Python would allocate a buffer of that size


def read_text(path: Path, limit: int = MAX_NOTE_BYTES) -> str:
    """Read a regular file of at most `limit` bytes as UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def check_writable(path: Path) -> None:
    """Raise DataError if no file can be written at `path`. Creates nothing; meant to be called before long work."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:  # missing folders are created on writing
        folder = folder.parent
    if path.is_dir():
        raise DataError(f"{path}: cannot be written: Is a directory")
    if not folder.is_dir():
        raise DataError(f"{path}: cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise DataError(f"{path}: cannot be written: Permission denied")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees either the old file or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically: a reader sees either the old file or the new one."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write (and to read back); it replaces `path` on exit, once it is complete and synced."""
    if _is_stream(path):
        with open(path, "wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path, Path.touch) as temporary, open(temporary, "r+b") as file:
        yield file
        sync(file)


def _is_stream(path: Path) -> bool:
    """Whether `path` is written to and never replaced: a device, or a pipe that the shell names, such as /dev/stdout.
    Any other pipe is replaced, since opening one without a reader would never return."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    named_by_shell = path.parts[1:2] in (("dev",), ("proc",))
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or (stat.S_ISFIFO(mode) and named_by_shell)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill; it replaces `path`, which must be missing or empty, once all its files are synced."""
    path = Path(os.path.realpath(path))  # `.` has no name, and a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path, Path.mkdir) as temporary:
        yield temporary
        for inside in (*temporary.rglob("*"), temporary):
            if not inside.is_symlink():
                sync_path(inside)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target` atomically: either the old link or the new one exists at any time."""
    with _replacing(path, lambda temporary: temporary.symlink_to(target)):
        pass


@contextmanager
def _replacing(path: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary path made by `create`; rename it to `path` on success, remove it on any exception."""
    sweep(path.parent, path.name)
    temporary = _temporary(path)
    with ExitStack() as stack:
        try:
            create(temporary)
            while not (fcntl is None or temporary.is_symlink() or stack.enter_context(_sweep_lock(temporary))):
                create(temporary)
            yield temporary
            rename(temporary, path)
        except BaseException:
            _remove(temporary)
            raise


@contextmanager
def _sweep_lock(path: Path) -> Iterator[bool]:
    """Hold a shared lock that keeps `sweep` from removing `path`; yield False if it has already been removed."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield path.exists()
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Rename within a file system, replacing `target`, and sync the folder so that the new name survives a crash."""
    os.replace(source, target)
    sync_path(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder; it is renamed first, so that a half-deleted folder is never found at `path`."""
    temporary = _temporary(path)
    rename(path, temporary)
    _remove(temporary)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files that killed processes left in a folder: those of `name`, or all of them. Files that a
    live process is writing are locked, and stay."""
    for leftover in [path for path in folder.glob(".*") if _TEMPORARY.fullmatch(path.name)]:
        if name is None or leftover.name[1:-9] == name:
            with suppress(OSError):  # locked, or owned by another user
                if fcntl is None or leftover.is_symlink():
                    _remove(leftover)
                    continue
                handle = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(leftover)
                finally:
                    os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(file: IO[Any]) -> None:
    """Flush an open file and wait until its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if missing; the system releases it when the process ends.

    Raises BlockingIOError if another process holds the lock. The holder may remove the file.
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
        # the previous holder removed the file between open and lock: try the new file


def _lock(handle: int) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some network file systems have no locks; there, the user must not start two processes
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file, without keeping any process from taking it."""
    try:
        with open_regular(path) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # such as a missing file
        return isinstance(error, BlockingIOError)


def checksums(path: Path) -> list[str]:
    """SHA-256 of every 32 MiB of a file: hashed by several threads, and damage can be located."""
    size = path.stat().st_size

    def checksum(start: int) -> str:
        digest, buffer, left = hashlib.sha256(), memoryview(bytearray(1 << 20)), min(CHECKSUM_BYTES, size - start)
        with open_regular(path) as file:
            file.seek(start)
            while left and (count := file.readinto(buffer[:left])):
                digest.update(buffer[:count])
                left -= count
        return digest.hexdigest()

    starts = range(0, max(1, size), CHECKSUM_BYTES)
    if len(starts) == 1:
        return [checksum(0)]
    with ThreadPoolExecutor(THREADS, "hash") as pool:
        return list(pool.map(checksum, starts))


def cache_folder() -> Path:
    """Folder from WEFT_CACHE, or weft's folder in the user's cache."""
    if folder := os.environ.get("WEFT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "weft"
