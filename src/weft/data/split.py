"""Training and validation: each section of text on its side, with its document's number there, and each row on its."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from weft.data.amount import amount
from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit, TextSource
from weft.data.documents import SECTION, Document, files, read, stamp, stamps
from weft.data.shards import Shard, Side
from weft.data.table import Row, RowSource, Skipped, read_rows, text_files
from weft.errors import DataError
from weft.files import utf8_size
from weft.text import tasks

SMALLEST_SECTION = 64


@dataclass(frozen=True, slots=True)
class Section:
    """A section of text on its side of the split. `document` counts on that side; `size` is in UTF-8 bytes."""

    side: Side
    text: str
    size: int
    document: int
    ends: bool


def split_sections(text: TextSource, section: int | None = None) -> Iterator[Section]:
    """All text in reading order, each section, of at most `section` bytes, on its side.

    A document's number grows where a document ends, and where the section before is on the other side.
    """
    numbers: dict[Side, int] = {"train": -1, "validation": -1}
    successor: dict[Side, int] = {"train": -1, "validation": -1}  # the section that would go on with the document
    section = section_for(text.sources) if section is None else section
    for at, (side, document) in enumerate(_sides(text, section)):
        if successor[side] != at:
            numbers[side] += 1
        successor[side] = -1 if document.ends else at + 1
        yield Section(side, document.text, utf8_size(document.text), numbers[side], document.ends)


def train_texts(text: TextSource) -> Iterator[str]:
    """The training side's text, section by section: what a tokenizer may learn from."""
    return (section.text for section in split_sections(text) if section.side == "train")


def section_for(sources: Sequence[str]) -> int:
    """How long a section is: short for a short text, so that some sections can be held out of it."""
    total = sum(size for _, size, *_ in stamps(sources))
    return min(SECTION, max(SMALLEST_SECTION, total // 256))


def _sides(text: TextSource, section: int) -> Iterator[tuple[Side, Document]]:
    documents, split = read(text.sources, column=text.column, section=section), text.validation
    if isinstance(split, HashSplit):
        for document in documents:
            yield _by_hash(document.text, split), document
    elif isinstance(split, TailSplit):
        yield from _tail(documents, _train_bytes(text, split, section))
    else:
        for document in documents:
            yield "train", document
        if isinstance(split, FilesSplit):
            for document in read(split.sources, column=text.column, section=section):
                yield "validation", document


def _by_hash(text: str, split: HashSplit) -> Side:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < split.fraction * 2**64 else "train"


def _train_bytes(text: TextSource, split: TailSplit, section: int) -> int:
    """Where the tail begins. A text whose size is not known from its files is read once just to be measured."""
    if "-" in text.sources:
        raise DataError("'-': validation.kind = 'tail' reads the text twice, which standard input can't; name a file")
    total = _total(tuple(text.sources), text.column, section, json.dumps(stamps(text.sources)))
    if split.bytes is None:
        return int(total * (1 - split.fraction))
    if split.bytes >= total:
        raise DataError(f"validation.bytes = {split.bytes}: the text has {total} bytes; hold out fewer")
    return total - split.bytes


@lru_cache(maxsize=8)
def _total(sources: tuple[str, ...], column: str, section: int, stamped: str) -> int:
    """The bytes of all text, remembered for as long as the files are `stamped` so."""
    known = amount(sources, [column])
    if known.exact:
        return known.bytes
    return sum(utf8_size(document.text) for document in read(sources, column=column, section=section))


def _tail(documents: Iterable[Document], train_bytes: int) -> Iterator[tuple[Side, Document]]:
    """Train until `train_bytes`, then validation; the section in which that falls is cut, not inside a character."""
    left = train_bytes
    for document in documents:
        size = utf8_size(document.text)
        if 0 < left < size:
            head = document.text.encode()[:left].decode(errors="ignore")
            if head:
                yield "train", replace(document, text=head, ends=False)
            yield "validation", replace(document, text=document.text[len(head) :])
        else:
            yield "train" if left > 0 else "validation", document
        left -= size


def check_sides(shards: Sequence[Shard], split: Split) -> None:
    """Both sides must hold something, or the text was too short to be split."""
    empty = {"train", "validation"} - {shard.split for shard in shards if shard.tokens}
    if isinstance(split, NoSplit):
        empty.discard("validation")
    if not empty:
        return
    side = min(empty)
    sections = sum(shard.sections for shard in shards)
    have = f"{sum(shard.bytes for shard in shards)} bytes of text in {sections} sections leave nothing for {side}"
    if isinstance(split, HashSplit):
        share = min(split.fraction, 1 - split.fraction)
        needed = math.ceil(math.log(1e-3) / math.log1p(-share))
        raise DataError(
            f"{have}; a hash split needs about {needed} documents or {needed * SMALLEST_SECTION} bytes of one text: "
            "add text, or set validation.kind to tail or none"
        )
    raise DataError(f"{have}; add text, or set validation.kind to none")


# ---- rows


def split_rows(source: RowSource, split: Split, skipped: Skipped | None = None) -> Iterator[Row]:
    """Every row with its side, in reading order; with `files` the validation rows come last.

    `hash` looks at the inputs alone, at neither labels nor numbers nor `target`, so that no input is on both sides.
    Built-in tasks hold out items by themselves, after the rest.
    """
    skipped = Skipped() if skipped is None else skipped
    kinds, own = source.columns, source.targets or isinstance(split, NoSplit | FilesSplit)
    held = [] if own else [name for name in source.sources if name in tasks.SOURCES]
    plain = replace(source, sources=[name for name in source.sources if name not in held])
    parts: list[Iterable[Row]] = []
    if plain.sources or not held:
        rows = read_rows(plain, "train", skipped)
        if isinstance(split, HashSplit):
            asked = [name for name, kind in kinds.items() if kind not in ("label", "number") and name != "target"]
            rows = _rows_by_hash(rows, asked or list(kinds), split)
        elif isinstance(split, TailSplit):
            rows = _rows_by_place(rows, _before_tail(plain, split))
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


def _rows_by_hash(rows: Iterable[Row], key: Sequence[str], split: HashSplit) -> Iterator[Row]:
    for row in rows:
        text = json.dumps([row.values[name] for name in key], ensure_ascii=False, sort_keys=True)
        yield Row(row.values, row.where, _by_hash(text, split))


def _rows_by_place(rows: Iterable[Row], tail: int) -> Iterator[Row]:
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
    key = json.dumps([*map(stamp, names), dict(source.columns), source.on_error, split.model_dump()])
    if key not in _tails:
        rows = read_rows(source)
        sizes = np.fromiter((sum(utf8_size(str(value)) for value in row.values.values()) for row in rows), np.int64)
        if len(_tails) >= 8:
            _tails.clear()
        _tails[key] = _place_of_tail(sizes, split)
    return _tails[key]


def _place_of_tail(sizes: npt.NDArray[np.int64], split: TailSplit) -> int:
    if split.bytes is None:
        return len(sizes) - round(len(sizes) * split.fraction)
    if split.bytes >= sum(sizes):
        raise DataError(f"validation.bytes = {split.bytes}: the rows have {sum(sizes)} bytes; hold out fewer")
    return len(sizes) - 1 - int(np.searchsorted(np.cumsum(sizes[::-1]), split.bytes))
