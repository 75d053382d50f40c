"""The held-out split: assign each section of text, with the number of its document, and each row to a side."""

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
from weft.data.sources import SECTION, Document, read_documents, stamps
from weft.data.table import Row, RowSource, SkippedRows, read_rows
from weft.errors import DataError, counted
from weft.progress import Log, bar, log_to_stderr
from weft.storage.files import utf8_size
from weft.text import builtin

MIN_SECTION = 64  # bytes of text in a section
MAX_AHEAD = 32 * 1024 * 1024  # characters read ahead while a hash split assigns all sections to one side
T = TypeVar("T")


class TextSection(NamedTuple):
    """A section of text of `size` bytes on one side of the split, with the number of its `document` on that side."""

    side: Side
    text: str
    size: int
    document: int
    begins: bool
    ends: bool
    wanted: bool = True  # whether its tokens are to be written; otherwise it only completes its document


def split_sections(text: TextSource, section: int | None = None, log: Log = log_to_stderr) -> Iterator[TextSection]:
    """Yield all text in reading order as sections of at most `section` bytes, each with its side. A side's document
    number increases after the end of a document, and after a section on the other side."""
    numbers = dict.fromkeys(SIDES, -1)
    successor = dict.fromkeys(SIDES, -1)  # index of the section that would continue the side's document
    section = section_for(text.sources) if section is None else section
    begins = True
    for at, (side, document) in enumerate(_assign_sides(text, section, log)):
        if successor[side] != at:
            numbers[side] += 1
        successor[side] = -1 if document.ends else at + 1
        size = utf8_size(document.text)
        yield TextSection(side, document.text, size, document=numbers[side], begins=begins, ends=document.ends)
        begins = document.ends


def train_texts(text: TextSource) -> Iterator[str]:
    """Text of the training side, section by section, for training a tokenizer; a bar shows how much has been read."""
    sections = split_sections(text, log=lambda line: None)  # messages are logged when the same text is prepared
    total = amount([*text.sources, *held_out_files(text.validation)], [text.column], text.encoding).bytes
    with bar("reading text", total or None, unit="bytes") as advance:
        for section in sections:
            advance(section.size)
            if section.side == "train":
                yield section.text


def require_text(texts: Iterable[str], sources: Iterable[str], advice: str = "") -> Iterator[str]:
    """Pass texts through; DataError that names their `sources` if all of them are empty. `advice` is an alternative to
    more text."""
    has_text = False
    for text in texts:
        has_text = has_text or bool(text)
        yield text
    if not has_text:
        short = f"too short to train on one part and hold out another; give some thousand characters{advice}"
        raise DataError(f"{', '.join(sources)}: {short}")


def section_for(sources: Sequence[str]) -> int:
    """Maximum bytes of a section: fewer for a short text, so that some of its sections can be held out."""
    total = sum(size for _, size, *_ in stamps(sources))
    return min(SECTION, max(MIN_SECTION, total // 256))


def _assign_sides(text: TextSource, section: int, log: Log) -> Iterator[tuple[Side, Document]]:
    split, column, encoding = text.validation, text.column, text.encoding
    held_out = held_out_files(split)
    documents = read_documents(text.sources, column, section=section, encoding=encoding, held_out=held_out)
    if isinstance(split, HashSplit):
        by_hash = ((side_by_hash(document.text, split), document) for document in documents)
        yield from _hash_or_tail(by_hash, split, log)
    elif isinstance(split, TailSplit):  # training first, then validation
        known = amount(text.sources, [text.column], text.encoding)
        if known.exact:
            yield from _split_tail(documents, _train_bytes(split, known.bytes))
            return
        # the amount of text is known only at its end
        tail = _TailBuffer[Document](lambda document: utf8_size(document.text), lambda total: _head_bytes(split, total))
        yield from (("train", document) for document in tail.head(documents))
        yield from _split_tail(tail.items, _train_bytes(split, tail.total) - tail.yielded)
    else:
        yield from (("train", document) for document in documents)
        if held_out:
            validation = read_documents(held_out, column, section=section, encoding=encoding)
            yield from (("validation", document) for document in validation)


def side_by_hash(text: str, split: HashSplit) -> Side:
    """Side of a text, which depends on the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < split.fraction * 2**64 else "train"


def _hash_or_tail(
    by_hash: Iterator[tuple[Side, Document]], split: HashSplit, log: Log
) -> Iterator[tuple[Side, Document]]:
    """Split by hash, unless all sections fall on one side, as equal sections or very few may: then hold out the last
    `fraction` of them. Reads ahead until both sides have occurred."""
    ahead, read = list[tuple[Side, Document]](), 0
    for side, document in by_hash:
        ahead.append((side, document))
        read += len(document.text)
        if side != ahead[0][0] or read > MAX_AHEAD:
            yield from chain(ahead, by_hash)
            return
    if len(ahead) < 2:
        yield from ahead  # `check_sides` will refuse it
        return
    train = max(1, len(ahead) - max(1, round(len(ahead) * split.fraction)))
    instead = f"the last {counted(len(ahead) - train, 'section')} instead, as data.validation.kind=tail does"
    log(f"a hash split would put all {len(ahead):,} sections of the text on one side: holding out {instead}")
    for number, (_, document) in enumerate(ahead):
        yield "train" if number < train else "validation", document


def _head_bytes(split: TailSplit, total: int) -> int:
    """Bytes before the tail of a text of `total` bytes; negative if there are too few."""
    return int(total * (1 - split.fraction)) if split.bytes is None else total - split.bytes


def _train_bytes(split: TailSplit, total: int, what: str = "text has") -> int:
    if split.bytes is not None and split.bytes >= total:
        raise DataError(f"data.validation.bytes = {split.bytes}: the {what} {counted(total, 'byte')}; hold out fewer")
    return _head_bytes(split, total)


class _TailBuffer(Generic[T]):
    """Buffers the tail of a stream of unknown length; `head_size` maps the total so far to the size of the head."""

    def __init__(self, size: Callable[[T], int], head_size: Callable[[int], int]):
        self.size, self.head_size = size, head_size
        self.items: deque[T] = deque()
        self._sizes: deque[int] = deque()
        self.total = self.yielded = 0

    def head(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items that belong to the head whatever follows; the others stay in `items`."""
        for item in items:
            self.items.append(item)
            self._sizes.append(self.size(item))
            self.total += self._sizes[-1]
            while self.items and self.yielded + self._sizes[0] <= self.head_size(self.total):
                self.yielded += self._sizes.popleft()
                yield self.items.popleft()


def _split_tail(documents: Iterable[Document], train_bytes: int) -> Iterator[tuple[Side, Document]]:
    """Assign `train_bytes` to training and the rest to validation; the section in between is divided at a character."""
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
    """Raise DataError if a side is empty because the text was too short to be split."""
    sides = ("train",) if isinstance(split, NoSplit) else SIDES
    empty = next((side for side in sides if not any(shard.tokens for shard in shards if shard.split == side)), None)
    if empty is not None:
        size, sections = sum(shard.bytes for shard in shards), sum(shard.sections for shard in shards)
        found = f"only {counted(size, 'byte')} of text in {counted(sections, 'section')}: nothing is left for {empty}"
        raise DataError(f"{found}; add text, or hold out nothing with data.validation.kind=none")


def split_rows(source: RowSource, split: Split, skipped: SkippedRows | None = None) -> Iterator[Row]:
    """Yield every row with its side, in reading order; with `files`, validation rows come last.

    `hash` considers the inputs only, not labels, numbers or `target`, so that no input is on both sides. Built-in tasks
    have their own split; their rows come after all others.
    """
    skipped = SkippedRows() if skipped is None else skipped
    one_side = source.targets or isinstance(split, NoSplit | FilesSplit)
    tasks = [] if one_side else [name for name in source.sources if name in builtin.TASK_SOURCES]
    others = [name for name in source.sources if name not in tasks]
    parts: list[Iterable[Row]] = []
    if others or not tasks:
        rows = read_rows(replace(source, sources=others, held_out=held_out_files(split)), "train", skipped)
        if isinstance(split, HashSplit):
            columns = source.columns.items()
            inputs = [name for name, kind in columns if kind not in ("label", "number") and name != "target"]
            key = inputs or list(source.columns)
            rows = (row._replace(side=side_by_hash(_hashed_text(row, key), split)) for row in rows)
        elif isinstance(split, TailSplit):
            rows = _split_tail_rows(rows, split)
        parts.append(rows)
    if tasks:
        parts += [read_rows(replace(source, sources=tasks), side, skipped) for side in SIDES]
    if isinstance(split, FilesSplit):
        validation = replace(source, sources=split.sources, targets=split.targets, held_out=())
        parts.append(read_rows(validation, "validation", skipped))
    counts: Counter[Side] = Counter()
    for row in chain.from_iterable(parts):
        counts[row.side] += 1
        yield row
    empty = next((side for side in SIDES if not counts[side]), None)
    if empty is not None and not isinstance(split, NoSplit):
        instead = "the last rows with data.validation.kind=tail, or nothing with data.validation.kind=none"
        found = f"{counted(counts.total(), 'row')}, of which none is left for {empty}"
        raise DataError(f"{found} (data.validation.kind = '{split.kind}'); add rows, or hold out {instead}")


def _hashed_text(row: Row, key: Sequence[str]) -> str:
    return json.dumps([row.values[name] for name in key], ensure_ascii=False, sort_keys=True)


def _split_tail_rows(rows: Iterable[Row], split: TailSplit) -> Iterator[Row]:
    """Hold out the last `fraction` of rows, or the last rows that hold `bytes` of text."""
    if split.bytes is None:
        tail = _TailBuffer[Row](lambda row: 1, lambda total: total - round(total * split.fraction))
        yield from tail.head(rows)
    else:
        sizes = lambda row: sum(utf8_size(str(value)) for value in row.values.values())  # noqa: E731
        tail = _TailBuffer[Row](sizes, lambda total: _head_bytes(split, total))
        yield from tail.head(rows)
        _train_bytes(split, tail.total, "rows have")
    yield from (row._replace(side="validation") for row in tail.items)
