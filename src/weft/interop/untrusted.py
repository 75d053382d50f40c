"""Untrusted files: every size in them is checked before it is used."""

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from weft.errors import InteropError

LARGEST = 100_000_000  # bytes of a file that is read whole; no header of a safetensors file may be larger either


def read_bytes(path: Path) -> bytes:
    """The bytes of a small file."""
    try:
        if path.stat().st_size > LARGEST:
            raise InteropError(f"{path}: {path.stat().st_size:,} bytes are too many for a settings file")
        return path.read_bytes()
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except OSError as error:
        raise InteropError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The text of a small file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InteropError(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InteropError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise InteropError(f"{path}: expected a JSON object")
    return tree


def mapped(path: Path) -> memoryview:
    """A file's bytes, which stay on the disk until they are used."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InteropError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


class Cursor:
    """A place in a file that moves on as the file is read; `what` names for an error the thing that is being read."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.place = path, data, 0

    @property
    def left(self) -> int:
        """Bytes that follow."""
        return len(self.data) - self.place

    def refusal(self, reason: str) -> InteropError:
        """The error about the file."""
        return InteropError(f"{self.path}: {reason}")

    def take(self, length: int, what: str) -> memoryview:
        """The next `length` bytes."""
        if length > self.left:
            raise self.refusal(
                f"truncated or damaged: {what} needs {length:,} bytes at byte {self.place:,}, {self.left:,} are left"
            )
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, form: str, what: str) -> Any:
        """The next number, little-endian, by struct's letter."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def count(self, form: str, smallest: int, what: str) -> int:
        """How many things follow, by struct's letter, each of `smallest` bytes at least."""
        count = self.number(form, what)
        if count * smallest > self.left:
            raise self.refusal(f"truncated or damaged: {count:,} {what} do not fit into the {self.left:,} bytes left")
        return count
