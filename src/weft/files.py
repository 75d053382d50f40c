"""Files that are whole or absent: written beside, synced, renamed."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import DataError


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8: bytes that were not, and half of a pair, stand in it as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_place(path: Path) -> None:
    """Refuse, before any work is done, a place where no file can be written; nothing is made there yet."""
    there = path.parent
    while not there.exists() and there != there.parent:  # what is missing will be made
        there = there.parent
    if path.is_dir():
        raise DataError(f"{path}: cannot be written: Is a directory")
    if not there.is_dir():
        raise DataError(f"{path}: cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise DataError(f"{path}: cannot be written: Permission denied")


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step; a reader sees the old file or the new one, never a part. Raises OSError."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """The same for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path`, missing or empty, when all in it is on the disk."""
    path = Path(os.path.realpath(path))  # `.` has no name, and a link stays a link
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.mkdir(parents=True)
        yield beside
        for inside in (*beside.rglob("*"), beside):
            if not inside.is_symlink():
                sync_path(inside)
        os.replace(beside, path)
        sync_path(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # it is gone where all went well


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
