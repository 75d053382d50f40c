"""Files from elsewhere: every size in them is checked before it is used, and what they say is shown as plain text.

How much a file may take has bounds. They are far above what is found in honest files; who trusts a larger one raises
all of them with WEFT_LIMITS=4 in the environment (four times as much). That is no setting of a recipe, for recipes
come from elsewhere too.
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
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's spelling of half a character
MAX_FACTOR = 1_000_000  # times the usual bounds
MAX_WHOLE_BYTES = 1 << 26  # of a file that is read whole: the largest tokenizers have half as many
POINTER = b"version https://git-lfs.github.com/spec/"  # how the file begins that stands for a larger one
# what a terminal obeys instead of showing: controls other than tab and line ends, and marks that turn a text around
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def bound(usual: int) -> int:
    """A bound on what a file from elsewhere may take, as many times the usual one as the person has set."""
    given = os.environ.get(LIMITS) or "1"
    try:
        factor = float(given)
    except ValueError:
        factor = math.nan
    if not 1 <= factor <= MAX_FACTOR:
        allowed = f"how many times the usual bounds to allow, 1 to {MAX_FACTOR:,}"
        raise ConfigError(f"{LIMITS} = {given!r}: expected {allowed}")
    return int(usual * factor)


def refuse_beyond(size: float, usual: int, what: str, kind: type[WeftError] = InteropError) -> None:
    """Refuse what is larger than its bound; `what` says what it is, and how large."""
    if size > bound(usual):
        factor = math.ceil(size / usual)
        hint = f" ({LIMITS}={factor} raises it, for a file that you trust)" if factor <= MAX_FACTOR else ""
        raise kind(f"{what}; the bound is {bound(usual):,}{hint}")


def printable(text: str) -> str:
    """A text for a terminal: what would move its cursor, colour it or turn it around is spelled out instead."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def parse_json(text: str | bytes, what: str, kind: type[WeftError] = InteropError) -> Any:
    """The value that JSON spells; `what` names it in an error. Text in it can be written again."""
    try:
        value = json.loads(text)
        if HALVES.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise kind(f"{what}: contains a lone surrogate, which is not a character") from None
    except RecursionError:
        raise kind(f"{what}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise kind(f"{what}: not valid JSON: {' '.join(str(error).split())}") from None


def _check_file(path: Path, kind: type[WeftError] = InteropError) -> None:
    """Refuse what is no file, for a pipe would be waited for without end, and a pointer to one."""
    if path.exists() and not path.is_file():
        raise kind(f"{path}: cannot be read: not a file")
    refuse_pointer(path, kind)


def refuse_pointer(path: Path, kind: type[WeftError] = InteropError) -> None:
    """Refuse what Git LFS leaves in the place of a large file that was not fetched: a few lines with its hash."""
    try:
        with files.open_regular(path) as file:
            pointer = file.read(len(POINTER)) == POINTER
    except OSError:
        return  # which whoever reads the file will say
    if pointer:
        raise kind(f"{path}: a pointer of Git LFS, and not the file itself; fetch it with git lfs pull")


def read_bytes(path: Path, kind: type[WeftError] = InteropError) -> bytes:
    """The bytes of a small file."""
    _check_file(path, kind)
    try:
        size = path.stat().st_size
        refuse_beyond(size, MAX_WHOLE_BYTES, f"{path}: {size:,} bytes are too many for a file that is read whole", kind)
        with files.open_regular(path) as file:
            return file.read(size)
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path, kind: type[WeftError] = InteropError) -> str:
    """The text of a small file."""
    try:
        return read_bytes(path, kind).decode("utf-8")
    except UnicodeDecodeError:
        raise kind(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return parse_json(read_text(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise InteropError(f"{path}: expected a JSON object")
    return tree


def optional_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file."""
    return read_object(path) if path.is_file() else {}


def mapped(path: Path) -> memoryview:
    """A file's bytes, which stay on the disk until they are used."""
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
            needs = f"needs {length:,} bytes at byte {self.place:,}, {self.left:,} are left"
            raise self.refusal(f"truncated or damaged: {what} {needs}")
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, form: str, what: str) -> Any:
        """The next number, little-endian, by struct's letter."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def count(self, form: str, min_bytes: int, what: str) -> int:
        """How many things follow, by struct's letter, each of `min_bytes` bytes at least."""
        count = self.number(form, what)
        if count * min_bytes > self.left:
            raise self.refusal(f"truncated or damaged: {count:,} {what} do not fit into the {self.left:,} bytes left")
        return count
