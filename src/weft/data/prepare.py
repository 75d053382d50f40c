"""From documents to token shards: read, split, encode and write at the same time, in bounded memory.

A run that was killed goes over the text again, which is quick, and encodes only what no finished shard holds
(`folder.py`). However many processes encode, the bytes are the same.

A text may be prepared in parts, each by a machine of its own. Files are lined up in reading order, and the parts are
equal shares of all their bytes. A file that lies in one share belongs to that part, and no other machine reads it. One
that lies in several is read by all of them, which is quick, and its sections are dealt out in stripes. Nothing but the
names, sizes and contents of the files decides, so every machine comes to the same division by itself. Parts put
together are the same bytes as one machine would have written: tokens are copied, not made again, stripe by stripe in
reading order, at about the disk's speed and in little memory.
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from weft.data.amount import amount
from weft.data.config import HashSplit, NumberedPart, Split, TailSplit, TextSource, held_out_files
from weft.data.encode import apart, encoded, together
from weft.data.folder import FORMAT, Plan, Writers, differing, read_plan, written
from weft.data.shards import PART, SIDES, Array, Ids, Shard, Shards, Side, dtype_for
from weft.data.sources import files, read_file, stamp, stamps
from weft.data.split import Section, check_sides, section_for, side_by_hash, split_sections
from weft.data.streams import is_utf8
from weft.errors import ConfigError, DataError, TokenizerError
from weft.progress import Advance, bar, warn
from weft.storage.files import utf8_size
from weft.text.tokenizer import Tokenizer
from weft.workers import cores

VERSION = 2  # of how text becomes tokens; in 1, weft 0.1's, each section was encoded as a text of its own
SHARD_TOKENS = 64 * 1024 * 1024
STRIPE_BITS = 6  # 64 sections of a file, one after another, have the same part
FILE_BITS = 33  # a place is the file's number, 32 bits of the section's number in it, and a bit: a document ends there
MIN_SHARED_BYTES = 32 * 1024 * 1024  # of text; for less, one process that is there already is quicker than several


def prepare(
    text: TextSource,
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
    jobs: int | None = None,
) -> Shards:
    """Writes the tokens of a text, or of a part of it, to the folder `out`; an unfinished one is continued.

    `jobs` processes encode. If left out, it is one for each processor, or for a short text this process alone. A folder
    that weft 0.1 began is continued in its way.
    """
    out = Path(out)
    if out.is_dir() and read_plan(out).get("version") == 1:
        text = replace(text, apart=True)
    plan = _plan(text, shard_tokens, tokenizer)

    def write(done: list[Shard]) -> list[Shard]:
        held_out = held_out_files(text.validation)
        size = sum(amount(given, [text.column], text.encoding).bytes for given in (text.sources, held_out))
        total = size // (1 if text.part is None else text.part.of) or None  # about as many bytes to encode
        dtype, frame = dtype_for(tokenizer.vocab_size), text.frame
        if frame is None:
            before = tokenizer.leading if tokenizer.adds_bos and not text.apart else ()
            frame = before, () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        several = total is not None and total >= MIN_SHARED_BYTES and cores() > 1
        processes = jobs or (cores() if several else None)
        read = split_sections if text.part is None else part_sections
        writers = Writers(out, plan, dtype, done)
        with bar("preparing", total, unit="bytes") as advance, writers.writing():
            sections = _remaining(read(text, plan["section"]), writers.held, advance)
            work = apart(sections) if text.apart else together(sections, tokenizer.split_points)
            with closing(encoded(work, tokenizer, frame, dtype, processes)) as rows:
                for section, ids in rows:
                    writers.add(section.side, ids, section.size, section.document)
        if text.part is None:
            check_sides(writers.shards, text.validation)
        return writers.shards

    return written(out, plan, tokenizer, write)


def _plan(text: TextSource, shard_tokens: int, tokenizer: Tokenizer) -> Plan:
    """All that decides the bytes to be written, as JSON would give it back."""
    split = text.validation
    plan = {
        "format": FORMAT,
        "version": 1 if text.apart else VERSION,
        "sources": stamps(text.sources, held_out_files(split)),
        "validation": split.model_dump(),
        "validation_sources": stamps(held_out_files(split)),
        "column": text.column,
        "section": section_for(text.sources),
        "shard_tokens": shard_tokens,
        "tokenizer": tokenizer.fingerprint,
    }
    if not is_utf8(text.encoding):
        plan["encoding"] = text.encoding
    if text.frame is not None:
        plan["frame"] = text.frame
    if text.part is not None:
        plan["part"] = [text.part.number, text.part.of]
    return json.loads(json.dumps(plan))


def _remaining(sections: Iterable[Section], held: Mapping[Side, int], advance: Advance) -> Iterator[Section]:
    """Wanted is what no finished shard holds: so many of the first sections of each side. `advance` gets all bytes."""
    left = dict(held)
    for section in sections:
        if section.wanted:
            advance(section.size)
            if left[section.side] > 0:
                left[section.side] -= 1
                section = section._replace(wanted=False)
        yield section


def parse_part(words: str) -> NumberedPart:
    """`3/16`."""
    number, slash, of = words.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"--part {words}: expected NUMBER/COUNT, such as 3/16 for the third of sixteen parts")
    return NumberedPart(int(number), int(of))


def part_sections(text: TextSource, section: int) -> Iterator[Section]:
    """The sections of a text's part, in reading order, each with its place instead of its document's number. Those of
    other parts in the same files are there as well, though not wanted: their documents are encoded as texts."""
    part, split = text.part, text.validation
    assert part is not None
    if isinstance(split, TailSplit):
        why = "where the tail of a text begins is known at its end"
        raise DataError(f"part {part}: {why}; hold out by hash or by files")
    held_out = held_out_files(split)
    if "-" in (*text.sources, *held_out):
        raise DataError(f"part {part}: standard input can't be read by every machine; name a file")
    train = files(text.sources, text.column, text.encoding, warn, held_out)
    names = [*train, *files(held_out, text.column, text.encoding, warn)]
    owned = shares([stamp(name)[1] for name in names], part.of)
    for number, (name, owners) in enumerate(zip(names, owned, strict=True)):
        if part.number - 1 not in owners:
            continue
        side: Side = "train" if number < len(train) else "validation"
        at, begins = -1, True
        for at, document in enumerate(read_file(name, text.column, section, text.encoding)):
            mine = owners[(at >> STRIPE_BITS) % len(owners)] == part.number - 1
            if isinstance(split, HashSplit):
                side = side_by_hash(document.text, split)
            place = number << FILE_BITS | at << 1 | document.ends
            yield Section(side, document.text, utf8_size(document.text), place, begins, document.ends, mine)
            begins = document.ends
        if at < 0 and name in (*text.sources, *held_out):
            raise DataError(f"{name}: contains no text")


def shares(sizes: Sequence[int], parts: int) -> list[range]:
    """For each file of these sizes the parts, counted from 0, in whose share of all bytes it lies."""
    total, start, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        first = min(start * parts // total, parts - 1)
        last = max(first, ((start + size) * parts - 1) // total)
        found.append(range(first, last + 1))
        start += size
    return found


def merge(folders: Sequence[str | Path], out: str | Path) -> Shards:
    """Writes the tokens of all parts of a text to the folder `out`; an unfinished one is continued."""
    parts = sorted(map(_opened, map(Path, folders)), key=lambda part: part.number.number)
    _check_together(parts)
    folder, plan = parts[0].folder, {key: value for key, value in parts[0].plan.items() if key != "part"}
    for part in parts:
        if part.shards.index.tokenizer != part.plan["tokenizer"]:
            raise DataError(f"{part.folder}: damaged: its index is of another tokenizer than its plan")
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        raise DataError(f"{folder}: damaged: {error}") from None
    if tokenizer.fingerprint != plan["tokenizer"]:
        raise DataError(f"{folder}: damaged: its tokenizer is not what was written")
    for part in parts:
        part.shards.verify()
    out, split = Path(out), TypeAdapter[Split](Split).validate_python(plan["validation"])
    dtype = parts[0].shards.index.dtype
    total = np.dtype(dtype).itemsize * sum(shard.tokens for part in parts for shard in part.shards.index.shards)

    def write(done: list[Shard]) -> list[Shard]:
        writers = Writers(out, plan, dtype, done)
        with bar("merging", total, unit="bytes") as advance:
            _copy(parts, writers, advance)
        check_sides(writers.shards, split)
        return writers.shards

    return written(out, plan, tokenizer, write)


class _Part(NamedTuple):
    folder: Path
    number: NumberedPart
    plan: Plan
    shards: Shards


def _opened(folder: Path) -> _Part:
    plan = read_plan(folder)
    if "part" not in plan:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        what = "prepared as a whole, not in parts" if plan else "not a folder that `weft prepare --part` wrote"
        raise DataError(f"{folder}: {what}; --merge takes the folders of all parts")
    try:
        number = NumberedPart(*map(int, plan["part"]))
    except (TypeError, ValueError):
        raise DataError(f"{folder}: damaged: its plan doesn't say which part it is") from None
    if not (folder / PART).exists():
        raise DataError(f"{folder}: part {number} is unfinished; run the same `weft prepare` again and it continues")
    return _Part(folder, number, plan, Shards.open(folder, PART))


def _check_together(parts: Sequence[_Part]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.number.of != first.number.of:
            raise DataError(f"{part.folder} is part {part.number}, but {first.folder} part {first.number}")
    for before, part in pairwise(parts):
        if before.number == part.number:
            raise DataError(f"part {part.number} is given twice: {before.folder} and {part.folder}")
    missing = sorted({*range(1, first.number.of + 1)} - {part.number.number for part in parts})
    if missing:
        named = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DataError(f"of {first.number.of} parts {named} {'is' if len(missing) == 1 else 'are'} missing")
    for part in parts[1:]:
        if keys := differing(_compared(first.plan), _compared(part.plan)):
            what = {"tokenizer": "another tokenizer", "sources": "other sources"}.get(keys[0], f"another {keys[0]}")
            raise DataError(f"{part.folder}: was made with {what} than {first.folder}; prepare it again with the same")


def _compared(plan: Plan) -> Plan:
    """A plan without what may differ between machines: a file's folder, and when it was copied there."""
    alike = {key: value for key, value in plan.items() if key != "part"}
    for key in ("sources", "validation_sources"):
        alike[key] = [[Path(str(name)).name, size] for name, size, *_ in plan.get(key, ())]
    return dict(sorted(alike.items(), key=lambda item: item[0] != "tokenizer"))


class _Run(NamedTuple):
    """Sections of one stripe and one side: ids (n,) as they are stored, and what `ShardWriter.extend` takes (3, m)."""

    stripe: int
    side: Side
    ids: Array
    sections: Ids


def _copy(parts: Sequence[_Part], writers: Writers, advance: Advance) -> None:
    """All stripes in reading order, but for the sections that finished shards hold."""
    held, last = dict(writers.held), -1  # the place before, of both sides
    before = dict.fromkeys(SIDES, (-1, -1))  # of each side the place, and the document's number
    runs = heapq.merge(*(_runs(part.shards, side) for part in parts for side in SIDES), key=lambda run: run.stripe)
    with writers.writing():
        for _, group in groupby(runs, key=lambda run: run.stripe):
            stripe = list(group)
            last = _follow(last, np.sort(np.concatenate([run.sections[2] for run in stripe])))
            for run in stripe:
                advance(run.ids.nbytes)
                places = run.sections[2]
                numbers = _numbered(places, *before[run.side])
                before[run.side] = int(places[-1]), int(numbers[-1])
                skipped = min(held[run.side], len(places))
                held[run.side] -= skipped
                writers.extend(run.side, run.ids, np.stack([*run.sections[:2], numbers])[:, skipped:])
    if last >= 0 and not last & 1:
        raise _gap()


def _runs(part: Shards, side: Side) -> Iterator[_Run]:
    for ids, sections in part.tokens(side).shards:
        stripes = sections[2] >> (STRIPE_BITS + 1)
        bounds = [0, *(np.flatnonzero(np.diff(stripes)) + 1).tolist(), sections.shape[1]]
        firsts = [*sections[0].tolist(), len(ids)]
        for start, stop in pairwise(bounds):
            begins = np.array([[firsts[start]], [0], [0]])
            yield _Run(int(stripes[start]), side, ids[firsts[start] : firsts[stop]], sections[:, start:stop] - begins)


def _numbered(places: Ids, last: int, number: int) -> Ids:
    """The numbers of a side's documents: a new one, unless a section goes on where the one before it stopped."""
    before = np.concatenate([[last], places[:-1]])
    goes_on = (places >> 1 == (before >> 1) + 1) & (before & 1 == 0)
    return number + np.cumsum(~goes_on)


def _follow(last: int, places: Ids) -> int:
    """The last of a stripe's places, if they follow the `last` one before without a gap."""
    before = np.concatenate([[last], places[:-1]])
    goes_on = places >> 1 == (before >> 1) + 1
    begins_file = (places % (1 << FILE_BITS) <= 1) & (before & 1 == 1) & (places > before)
    if not (goes_on | begins_file).all():
        raise _gap()
    return int(places[-1])


def _gap() -> DataError:
    return DataError("the parts don't fit together: a file of the text was another one, or changed, on some machine")
