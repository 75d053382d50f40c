"""Files whose checksums were found right, noted in `verified.json` beside them, so that looking again costs nothing.

A note holds for as long as the file has the size, the time of change and the checksum that it had.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.files import write_text

FILE = "verified.json"


def is_noted(path: Path, checksum: str) -> bool:
    """Whether this file was found to have this checksum, and has not changed since."""
    try:
        return _noted(path.parent).get(path.name) == _stamp(path, checksum)
    except OSError:
        return False


def note(checksums: Mapping[Path, str]) -> None:
    """Note that these files have these checksums, where their folders can be written to."""
    for folder in {path.parent for path in checksums}:
        with suppress(OSError):
            found = {path.name: _stamp(path, sum_) for path, sum_ in checksums.items() if path.parent == folder}
            write_text(folder / FILE, json.dumps(_noted(folder) | found, indent=1) + "\n")


def _stamp(path: Path, checksum: str) -> list[Any]:
    status = path.stat()
    return [checksum, status.st_size, status.st_mtime_ns]


def _noted(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
