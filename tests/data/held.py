"""Tokens and examples for tests, without files that stay."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.examples import Example, Examples, write_sides
from weft.data.shards import Tokens


def write_examples(path: Path, rows: Iterable[Example], *, notes: dict[str, Any] | None = None) -> Examples:
    """Examples of one side in a file."""
    return write_sides({"train": path}, (("train", row) for row in rows), notes=notes)["train"]


def examples(rows: Iterable[Example], notes: dict[str, Any] | None = None) -> Examples:
    """Examples in a file that is gone; what was mapped of it remains."""
    with tempfile.TemporaryDirectory() as folder:
        return write_examples(Path(folder) / "examples", rows, notes=notes)


def tokens(ids: npt.ArrayLike, starts: Sequence[int] = (0,), sizes: Sequence[int] | None = None) -> Tokens:
    """Tokens in memory. `starts` are the documents' first tokens, `sizes` their UTF-8 bytes (0 if not given)."""
    sections = np.array([starts, sizes or [0] * len(starts), range(len(starts))], dtype=np.int64)
    return Tokens([np.asarray(ids, dtype=np.int64)], [sections])
