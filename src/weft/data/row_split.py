"""Training and validation: each row on its side."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit
from weft.data.documents import files, stamp
from weft.data.shards import Side
from weft.data.table import Kind, Row, RowSource, Skipped, read_rows, text_files
from weft.errors import DataError
from weft.files import utf8_size
from weft.text import tasks


def split_rows(source: RowSource, split: Split, skipped: Skipped | None = None) -> Iterator[Row]:
    """Every row with its side, in reading order; with `files` the validation rows come last.

    `hash` looks at the inputs alone, at neither labels nor numbers nor `target`, so that no input is on both sides.
    Built-in tasks hold out items by themselves, after the rest.
    """
    skipped = Skipped() if skipped is None else skipped
    own = source.targets or isinstance(split, NoSplit | FilesSplit)
    held = [] if own else [name for name in source.sources if _is_task(name)]
    plain = replace(source, sources=[name for name in source.sources if name not in held])
    parts: list[Iterable[Row]] = []
    if plain.sources or not held:
        rows = read_rows(plain, "train", skipped)
        if isinstance(split, HashSplit):
            rows = _by_hash(rows, _asked(source.kinds), split.fraction)
        elif isinstance(split, TailSplit):
            rows = _by_place(rows, _before_tail(plain, split))
        parts.append(rows)
    sides: tuple[Side, ...] = ("train", "validation")
    if held:
        parts += [read_rows(replace(source, sources=held), side, skipped) for side in sides]
    if isinstance(split, FilesSplit):
        there = replace(source, sources=split.sources, targets=split.targets)
        parts.append(read_rows(there, "validation", skipped))
    seen: Counter[Side] = Counter()
    for row in chain.from_iterable(parts):
        seen[row.side] += 1
        yield row
    empty = next((side for side in sides if not seen[side]), None)
    if empty is not None and not isinstance(split, NoSplit):
        raise DataError(
            f"{seen.total()} rows leave none for {empty} (validation.kind = '{split.kind}'); "
            "add rows, change validation.fraction, or set validation.kind to none"
        )


def _is_task(source: str) -> bool:
    return source.startswith("builtin:") and source.removeprefix("builtin:") in tasks.TASKS


# ---- by hash


def _asked(kinds: Mapping[str, Kind]) -> list[str]:
    asked = [name for name, kind in kinds.items() if kind not in ("label", "number") and name != "target"]
    return asked or list(kinds)


def _by_hash(rows: Iterable[Row], key: Sequence[str], fraction: float) -> Iterator[Row]:
    for row in rows:
        text = json.dumps([row.values[name] for name in key], ensure_ascii=False, sort_keys=True)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        held = int.from_bytes(digest, "big") < fraction * 2**64
        yield Row(row.values, row.where, "validation") if held else row


# ---- by place


def _by_place(rows: Iterable[Row], tail: int) -> Iterator[Row]:
    for number, row in enumerate(rows):
        yield row if number < tail else Row(row.values, row.where, "validation")


_tails: dict[str, int] = {}  # of what was measured before, by all that it depends on


def _before_tail(source: RowSource, split: TailSplit) -> int:
    """How many rows come before the tail: the last `fraction` of rows, or the last rows that hold `bytes` of text.

    The rows are read once just to be measured, for as long as their files stay what they are.
    """
    if "-" in source.sources:
        raise DataError("'-': validation.kind = 'tail' reads the rows twice, which standard input can't; name a file")
    names = text_files([*source.sources, *source.targets]) if source.targets else files(source.sources)
    key = json.dumps([*map(stamp, names), source.kinds, source.on_error, split.model_dump()])
    if key not in _tails:
        sizes = array("q", (_size(row) for row in read_rows(source)))
        if len(_tails) >= 8:
            _tails.clear()
        _tails[key] = _place_of_tail(sizes, split)
    return _tails[key]


def _size(row: Row) -> int:
    return sum(utf8_size(str(value)) for value in row.values.values())


def _place_of_tail(sizes: "array[int]", split: TailSplit) -> int:
    if split.bytes is None:
        return len(sizes) - round(len(sizes) * split.fraction)
    if split.bytes >= sum(sizes):
        raise DataError(f"validation.bytes = {split.bytes}: the rows have {sum(sizes)} bytes; hold out fewer")
    held, row = 0, len(sizes)
    while held < split.bytes:
        row -= 1
        held += sizes[row]
    return row
