"""Tokens and examples in memory, for tests."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.examples import Example, Examples, write_sides
from weft.data.shards import Tokens


def write_examples(path: Path, rows: Iterable[Example], *, notes: dict[str, Any] | None = None) -> Examples:
    """Write examples of one side to a file and open it."""
    return write_sides({"train": path}, (("train", row) for row in rows), notes=notes)["train"]


def examples(rows: Iterable[Example], notes: dict[str, Any] | None = None) -> Examples:
    """Examples mapped from a file that is already deleted."""
    with tempfile.TemporaryDirectory() as folder:
        return write_examples(Path(folder) / "examples", rows, notes=notes)


def tokens(ids: npt.ArrayLike, starts: Sequence[int] = (0,), sizes: Sequence[int] | None = None) -> Tokens:
    """Tokens in memory. `starts` are the offsets of the documents, `sizes` their UTF-8 bytes (default 0)."""
    sections = np.array([starts, sizes or [0] * len(starts), range(len(starts))], dtype=np.int64)
    return Tokens([np.asarray(ids, dtype=np.int64)], [sections])
