"""A text in parts, each for a machine of its own: which part has which section, and all put together again.

Files are lined up in reading order, and the parts are equal shares of all their bytes. A file that lies in one share
belongs to that part, and no other machine reads it. One that lies in several is read by all of them, which is quick,
and its sections are dealt out in stripes. Nothing but the names, sizes and contents of the files decides, so every
machine comes to the same division by itself.

Parts put together are the same bytes as one machine would have written: tokens are copied, not made again, stripe by
stripe in reading order, at about the disk's speed and in little memory.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from weft.data.config import FilesSplit, HashSplit, NumberedPart, Split, TailSplit, TextSource
from weft.data.documents import read_file
from weft.data.folder import Plan, Writers, differing, read_plan, written
from weft.data.shards import PART, SIDES, Ids, Shard, Shards, Side
from weft.data.sources import files, stamp
from weft.data.split import Section, check_sides, side_by_hash
from weft.data.store import Array
from weft.errors import ConfigError, DataError, TokenizerError
from weft.files import utf8_size
from weft.progress import Advance, bar, warn
from weft.text.tokenizer import Tokenizer

STRIPE_BITS = 6  # 64 sections of a file, one after another, have the same part
FILE_BITS = 33  # a place is the file's number, 32 bits of the section's number in it, and a bit: a document ends there


def parse_part(words: str) -> NumberedPart:
    """`3/16`."""
    number, slash, of = words.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"--part {words}: expected NUMBER/COUNT, such as 3/16 for the third of sixteen parts")
    return NumberedPart(int(number), int(of))


def part_sections(text: TextSource, section: int) -> Iterator[Section]:
    """The sections of a text's part, in reading order, each with its place instead of its document's number.

    Those of other parts in the same files are there as well, though not wanted: their documents are encoded as texts.
    """
    part, split = text.part, text.validation
    assert part is not None
    if isinstance(split, TailSplit):
        raise DataError(
            f"part {part}: where the tail of a text begins is known at its end; hold out by hash or by files"
        )
    held_out = split.sources if isinstance(split, FilesSplit) else ()
    if "-" in (*text.sources, *held_out):
        raise DataError(f"part {part}: standard input can't be read by every machine; name a file")
    train = files(text.sources, text.column, text.encoding, warn)
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


# ---- put together


def merge(folders: Sequence[str | Path], out: str | Path) -> Shards:
    """Writes the tokens of all parts of a text to the folder `out`; an unfinished one is continued."""
    parts = sorted(map(_opened, map(Path, folders)), key=lambda part: part.number.number)
    _check_together(parts)
    plan = {key: value for key, value in parts[0].plan.items() if key != "part"}
    tokenizer = _tokenizer(parts)
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
    """A part's folder."""

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
    """Refuse parts that one machine wouldn't have written together."""
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


def _tokenizer(parts: Sequence[_Part]) -> Tokenizer:
    """The tokenizer of all parts."""
    for part in parts:
        if part.shards.index.tokenizer != part.plan["tokenizer"]:
            raise DataError(f"{part.folder}: damaged: its index is of another tokenizer than its plan")
    folder, plan = parts[0].folder, parts[0].plan
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        raise DataError(f"{folder}: damaged: {error}") from None
    if tokenizer.fingerprint != plan["tokenizer"]:
        raise DataError(f"{folder}: damaged: its tokenizer is not what was written")
    return tokenizer


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
    """A part's sections of a side, stripe by stripe."""
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
