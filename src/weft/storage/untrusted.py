"""Reading untrusted files: every size is checked before it is used, and their text is printed without control codes.

Sizes are bounded, far above those of legitimate files. To read a larger file that you trust, raise all bounds with the
environment variable WEFT_LIMITS (WEFT_LIMITS=4: four times as much). It is not a setting of a recipe, because a recipe
may be untrusted too.
"""

import json
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, InteropError, WeftError
from weft.storage import files

LIMITS = "WEFT_LIMITS"
LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a JSON escape that may be one
MAX_FACTOR = 1_000_000  # of WEFT_LIMITS
MAX_WHOLE_BYTES = 1 << 26  # size of a file that is read into memory; the largest tokenizers have half of it
POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer
# control characters other than tab and line ends, and marks that reverse the direction of text
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def bound(default: int) -> int:
    """Return `default` multiplied by WEFT_LIMITS, the user's factor on all bounds."""
    setting = os.environ.get(LIMITS) or "1"
    try:
        factor = float(setting)
    except ValueError:
        factor = math.nan
    if not 1 <= factor <= MAX_FACTOR:
        allowed = f"a factor by which to raise the bounds, 1 to {MAX_FACTOR:,}"
        raise ConfigError(f"{LIMITS} = {setting!r}: expected {allowed}")
    return int(default * factor)


def refuse_beyond(size: float, default: int, what: str, *, kind: type[WeftError] = InteropError) -> None:
    """Raise `kind` if `size` exceeds its bound; `what` begins the message and gives the size."""
    if size > bound(default):
        factor = math.ceil(size / default)
        hint = f" ({LIMITS}={factor} raises it, for a file that you trust)" if factor <= MAX_FACTOR else ""
        raise kind(f"{what}; the bound is {bound(default):,}{hint}")


def printable(text: str) -> str:
    """Escape everything that would move a terminal's cursor, colour the text or reverse its direction."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def parse_json(text: str | bytes, what: str, kind: type[WeftError] = InteropError) -> Any:
    """Parse JSON; `what` names it in an error. Lone surrogates are refused, so all text can be encoded again."""
    try:
        value = json.loads(text)
        if LONE_SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise kind(f"{what}: contains a lone surrogate, which is not a character") from None
    except RecursionError:
        raise kind(f"{what}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise kind(f"{what}: not valid JSON: {' '.join(str(error).split())}") from None


def _check_file(path: Path, kind: type[WeftError] = InteropError) -> None:
    """Refuse anything but a regular file (reading a pipe may block forever), and Git LFS pointers."""
    if path.exists() and not path.is_file():
        raise kind(f"{path}: cannot be read: not a file")
    refuse_pointer(path, kind)


def refuse_pointer(path: Path, kind: type[WeftError] = InteropError) -> None:
    """Refuse the pointer that Git LFS leaves instead of a large file that was not fetched."""
    try:
        with files.open_regular(path) as file:
            pointer = file.read(len(POINTER)) == POINTER
    except OSError:
        return  # reading the file will report it
    if pointer:
        raise kind(f"{path}: a Git LFS pointer, not the file itself; fetch it with git lfs pull")


def read_bytes(path: Path, kind: type[WeftError] = InteropError) -> bytes:
    """Read a small file."""
    _check_file(path, kind)
    try:
        size = path.stat().st_size
        what = f"{path}: {size:,} bytes are too many for a file that is read into memory"
        refuse_beyond(size, MAX_WHOLE_BYTES, what, kind=kind)
        with files.open_regular(path) as file:
            return file.read(size)
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path, kind: type[WeftError] = InteropError) -> str:
    """Read a small text file as UTF-8."""
    try:
        return read_bytes(path, kind).decode("utf-8")
    except UnicodeDecodeError:
        raise kind(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """Parse a small JSON file."""
    return parse_json(read_text(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Parse a small JSON file that must contain an object."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise InteropError(f"{path}: expected a JSON object")
    return tree


def optional_object(path: Path) -> dict[str, Any]:
    """Parse a small JSON file that must contain an object; return {} if the file is missing."""
    return read_object(path) if path.is_file() else {}


def map_file(path: Path) -> memoryview:
    """Memory-map a file for reading."""
    _check_file(path)
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise InteropError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InteropError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


class Cursor:
    """Reads a binary file from front to back; `what` names the field being read in an error."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.offset = path, data, 0

    @property
    def left(self) -> int:
        """Number of bytes not yet read."""
        return len(self.data) - self.offset

    def error(self, reason: str) -> InteropError:
        """Return, for the caller to raise, an error that names the file."""
        return InteropError(f"{self.path}: {reason}")

    def take(self, length: int, what: str) -> memoryview:
        """Read the next `length` bytes."""
        if length > self.left:
            needs = f"needs {length:,} bytes at byte {self.offset:,}, {self.left:,} are left"
            raise self.error(f"truncated or damaged: {what} {needs}")
        self.offset += length
        return self.data[self.offset - length : self.offset]

    def number(self, form: str, what: str) -> Any:
        """Read the next little-endian number; `form` is its letter in a struct format."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def count(self, form: str, min_bytes: int, what: str) -> int:
        """Read the number of items that follow, refusing one that cannot fit if each item has `min_bytes` or more."""
        count = self.number(form, what)
        if count * min_bytes > self.left:
            raise self.error(f"truncated or damaged: {count:,} {what} do not fit into the {self.left:,} bytes left")
        return count
