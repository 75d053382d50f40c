"""Training and validation: each section of text on its side, with its document's number there, and each row on its."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from weft.data.amount import amount
from weft.data.config import FilesSplit, HashSplit, NoSplit, Split, TailSplit, TextSource, held_out_files
from weft.data.shards import SIDES, Shard, Side
from weft.data.sources import SECTION, Document, read, stamps
from weft.data.table import Row, RowSource, Skipped, read_rows
from weft.errors import DataError, counted
from weft.progress import Log, log_to_stderr
from weft.storage.files import utf8_size
from weft.text import builtin

MIN_SECTION = 64  # bytes
MAX_AHEAD = 32 * 1024 * 1024  # characters read ahead while all of them fall on one side of a hash split
T = TypeVar("T")


class Section(NamedTuple):
    """A section of text on its side of the split. `document` counts on that side; `size` is in UTF-8 bytes.

    Whether its document `begins` and `ends` with it; and whether its tokens are `wanted`, or it is there as a part of
    the document alone.
    """

    side: Side
    text: str
    size: int
    document: int
    begins: bool
    ends: bool
    wanted: bool = True


def split_sections(text: TextSource, section: int | None = None, log: Log = log_to_stderr) -> Iterator[Section]:
    """All text in reading order, each section, of at most `section` bytes, on its side. A document's number grows where
    a document ends, and where the section before is on the other side."""
    numbers = dict.fromkeys(SIDES, -1)
    successor = dict.fromkeys(SIDES, -1)  # the section that would go on with the document
    section = section_for(text.sources) if section is None else section
    begins = True
    for at, (side, document) in enumerate(_sides(text, section, log)):
        if successor[side] != at:
            numbers[side] += 1
        successor[side] = -1 if document.ends else at + 1
        yield Section(side, document.text, utf8_size(document.text), numbers[side], begins, document.ends)
        begins = document.ends


def train_texts(text: TextSource) -> Iterator[str]:
    """The training side's text, section by section: what a tokenizer may learn from."""
    sections = split_sections(text, log=lambda line: None)  # preparing the same text says what is to be said about it
    return (section.text for section in sections if section.side == "train")


def some_texts(texts: Iterable[str], sources: Iterable[str], advice: str = "") -> Iterator[str]:
    """The same texts, for a tokenizer to learn from; if all of them are empty, an error names their `sources`. `advice`
    is what helps besides more text."""
    found = False
    for text in texts:
        found = found or bool(text)
        yield text
    if not found:
        short = f"too short to learn from one part and hold out another; give some thousand characters{advice}"
        raise DataError(f"{', '.join(sources)}: {short}")


def section_for(sources: Sequence[str]) -> int:
    """How long a section is: short for a short text, so that some sections can be held out of it."""
    total = sum(size for _, size, *_ in stamps(sources))
    return min(SECTION, max(MIN_SECTION, total // 256))


def _sides(text: TextSource, section: int, log: Log) -> Iterator[tuple[Side, Document]]:
    split, column, encoding = text.validation, text.column, text.encoding
    documents = read(text.sources, column, section=section, encoding=encoding, held_out=held_out_files(split))
    if isinstance(split, HashSplit):
        sided = ((side_by_hash(document.text, split), document) for document in documents)
        yield from _or_tail(sided, split, log)
    elif isinstance(split, TailSplit):  # training first, then validation
        known = amount(text.sources, [text.column], text.encoding)
        if known.exact:
            yield from _tail(documents, _train_bytes(split, known.bytes))
            return
        # where files don't tell how much text there is, it is known at its end only
        held = _HeldBack[Document](lambda document: utf8_size(document.text), lambda seen: _before(split, seen))
        yield from (("train", document) for document in held.passing(documents))
        yield from _tail(held.items, _train_bytes(split, held.seen) - held.passed)
    else:
        yield from (("train", document) for document in documents)
        if isinstance(split, FilesSplit):
            held_out = read(split.sources, column, section=section, encoding=encoding)
            yield from (("validation", document) for document in held_out)


def side_by_hash(text: str, split: HashSplit) -> Side:
    """The side of a text, by nothing but itself."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < split.fraction * 2**64 else "train"


def _or_tail(sided: Iterator[tuple[Side, Document]], split: HashSplit, log: Log) -> Iterator[tuple[Side, Document]]:
    """What a hash split gives, unless all of it is on one side: sections that are alike are, and a few may be. Then the
    last ones are held out, `fraction` of them. Some are read ahead, until both sides have been seen."""
    ahead: list[tuple[Side, Document]] = []
    read = 0
    for side, document in sided:
        ahead.append((side, document))
        read += len(document.text)
        if side != ahead[0][0] or read > MAX_AHEAD:
            yield from chain(ahead, sided)
            return
    if len(ahead) < 2:
        yield from ahead  # nothing to divide: it is refused where the sides are counted
        return
    before = max(1, len(ahead) - max(1, round(len(ahead) * split.fraction)))
    instead = f"the last {counted(len(ahead) - before, 'section')} instead, as data.validation.kind=tail does"
    log(f"a hash split would put all {len(ahead):,} sections of the text on one side: holding out {instead}")
    for number, (_, document) in enumerate(ahead):
        yield "train" if number < before else "validation", document


def _before(split: TailSplit, total: int) -> int:
    """The bytes of text before the tail of so many; below 0 where there are too few."""
    return int(total * (1 - split.fraction)) if split.bytes is None else total - split.bytes


def _train_bytes(split: TailSplit, total: int, what: str = "text has") -> int:
    if split.bytes is not None and split.bytes >= total:
        raise DataError(f"data.validation.bytes = {split.bytes}: the {what} {counted(total, 'byte')}; hold out fewer")
    return _before(split, total)


class _HeldBack(Generic[T]):
    """Passes on what is training whatever still follows, and holds the rest: about as much as will be held out."""

    def __init__(self, size: Callable[[T], int], before: Callable[[int], int]):
        self.size, self.before = size, before
        self.items: deque[T] = deque()
        self._sizes: deque[int] = deque()
        self.seen = self.passed = 0

    def passing(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self.items.append(item)
            self._sizes.append(self.size(item))
            self.seen += self._sizes[-1]
            while self.items and self.passed + self._sizes[0] <= self.before(self.seen):
                self.passed += self._sizes.popleft()
                yield self.items.popleft()


def _tail(documents: Iterable[Document], train_bytes: int) -> Iterator[tuple[Side, Document]]:
    """Train until `train_bytes`, then validation; the section in which that falls is cut, not inside a character."""
    left = train_bytes
    for document in documents:
        size = utf8_size(document.text)
        if 0 < left < size:
            if head := document.text.encode()[:left].decode(errors="ignore"):
                yield "train", Document(head, ends=False)
            yield "validation", Document(document.text[len(head) :], document.ends)
        else:
            yield "train" if left > 0 else "validation", document
        left -= size


def check_sides(shards: Sequence[Shard], split: Split) -> None:
    """Both sides must hold something, or the text was too short to be split."""
    wanted = ("train",) if isinstance(split, NoSplit) else SIDES
    empty = next((side for side in wanted if not any(shard.tokens for shard in shards if shard.split == side)), None)
    if empty is not None:
        size, sections = sum(shard.bytes for shard in shards), sum(shard.sections for shard in shards)
        found = f"only {counted(size, 'byte')} of text in {counted(sections, 'section')}: nothing is left for {empty}"
        raise DataError(f"{found}; add text, or hold out nothing with data.validation.kind=none")


def split_rows(source: RowSource, split: Split, skipped: Skipped | None = None) -> Iterator[Row]:
    """Every row with its side, in reading order; with `files` the validation rows come last.

    `hash` looks at the inputs alone, at neither labels nor numbers nor `target`, so that no input is on both sides.
    Built-in tasks hold out items by themselves, after the rest.
    """
    skipped = Skipped() if skipped is None else skipped
    kinds, own = source.columns, source.targets or isinstance(split, NoSplit | FilesSplit)
    held = [] if own else [name for name in source.sources if name in builtin.TASK_SOURCES]
    others = [name for name in source.sources if name not in held]
    plain = replace(source, sources=others, held_out=held_out_files(split))
    parts: list[Iterable[Row]] = []
    if plain.sources or not held:
        rows = read_rows(plain, "train", skipped)
        if isinstance(split, HashSplit):
            asked = [name for name, kind in kinds.items() if kind not in ("label", "number") and name != "target"]
            key = asked or list(kinds)
            rows = (row._replace(side=side_by_hash(_spelled(row, key), split)) for row in rows)
        elif isinstance(split, TailSplit):
            rows = _rows_by_place(rows, split)
        parts.append(rows)
    if held:
        parts += [read_rows(replace(source, sources=held), side, skipped) for side in SIDES]
    if isinstance(split, FilesSplit):
        there = replace(source, sources=split.sources, targets=split.targets, held_out=())
        parts.append(read_rows(there, "validation", skipped))
    seen: Counter[Side] = Counter()
    for row in chain.from_iterable(parts):
        seen[row.side] += 1
        yield row
    empty = next((side for side in SIDES if not seen[side]), None)
    if empty is not None and not isinstance(split, NoSplit):
        instead = "the last rows with data.validation.kind=tail, or nothing with data.validation.kind=none"
        found = f"{counted(seen.total(), 'row')}, of which none is left for {empty}"
        raise DataError(f"{found} (data.validation.kind = '{split.kind}'); add rows, or hold out {instead}")


def _spelled(row: Row, key: Sequence[str]) -> str:
    return json.dumps([row.values[name] for name in key], ensure_ascii=False, sort_keys=True)


def _rows_by_place(rows: Iterable[Row], split: TailSplit) -> Iterator[Row]:
    """The tail is the last `fraction` of rows, or the last rows that hold `bytes` of text."""
    if split.bytes is None:
        held = _HeldBack[Row](lambda row: 1, lambda seen: seen - round(seen * split.fraction))
        yield from held.passing(rows)
    else:
        sizes = lambda row: sum(utf8_size(str(value)) for value in row.values.values())  # noqa: E731
        held = _HeldBack[Row](sizes, lambda seen: _before(split, seen))
        yield from held.passing(rows)
        _train_bytes(split, held.seen, "rows have")
    yield from (row._replace(side="validation") for row in held.items)
