"""Training and validation: each section of text on its side, with its document's number there."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.data.amount import amount
from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit, TextSource
from weft.data.documents import SECTION, Document, read, stamps
from weft.data.shards import Shard, Side
from weft.errors import DataError
from weft.files import utf8_size

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
            digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
            held = int.from_bytes(digest, "big") < split.fraction * 2**64
            yield "validation" if held else "train", document
    elif isinstance(split, TailSplit):
        yield from _tail(documents, _train_bytes(text, split, section))
    else:
        for document in documents:
            yield "train", document
        if isinstance(split, FilesSplit):
            for document in read(split.sources, column=text.column, section=section):
                yield "validation", document


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
