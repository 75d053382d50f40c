"""Prepare documents as token shards: read, split, encode and write concurrently, in bounded memory.

After a crash, the text is read again, which is fast, but only sections that no finished shard holds are encoded
(`folder.py`). The output does not depend on the number of processes.

A text may be prepared in parts by several machines. All files, in reading order, are divided into parts of equal size
in bytes. A file that lies in one part is read by one machine only. A file that spans several parts is read by all of
their machines, which is fast, and its sections are dealt out in stripes. The division depends only on the names, sizes
and contents of the files, so every machine computes the same one. Merging the parts gives the same bytes as one machine
would write: tokens are copied, stripe by stripe in reading order, at about the disk's speed and in little memory.
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
from weft.data.encode import document_jobs, encode_jobs, separate_jobs
from weft.data.folder import FORMAT, FolderWriter, Plan, differing_keys, read_plan, write_folder
from weft.data.shards import PART, SIDES, Array, Ids, Shard, Shards, Side, dtype_for
from weft.data.sources import find_files, read_file, stamp, stamps
from weft.data.split import TextSection, check_sides, section_for, side_by_hash, split_sections
from weft.data.streams import is_utf8
from weft.errors import ConfigError, DataError, TokenizerError
from weft.progress import Advance, bar, warn
from weft.storage.files import utf8_size
from weft.text.tokenizer import Tokenizer
from weft.workers import cores

VERSION = 2  # of the encoding of text; in version 1, of weft 0.1, each section was encoded as a separate text
SHARD_TOKENS = 64 * 1024 * 1024
STRIPE_BITS = 6  # 64 consecutive sections of a file are one stripe, and belong to one part
FILE_BITS = 33  # a position is the file's number, 32 bits of section number, and one bit: whether a document ends there
GAP = "the parts don't fit together: a file of the text differs between machines, or has changed"
MIN_SHARED_BYTES = 32 * 1024 * 1024  # of text; below this, starting processes takes longer than it saves


def prepare(
    text: TextSource,
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
    jobs: int | None = None,
) -> Shards:
    """Write the tokens of a text, or of one part of it, to the folder `out`, or complete an unfinished folder.

    `jobs` is the number of encoding processes; by default one per core, or this process alone for a short text. A
    folder begun by weft 0.1 is completed with its encoding.
    """
    out = Path(out)
    if out.is_dir() and read_plan(out).get("version") == 1:
        text = replace(text, separate_sections=True)
    plan = _plan(text, shard_tokens, tokenizer)

    def write(done: list[Shard]) -> list[Shard]:
        held_out = held_out_files(text.validation)
        size = sum(amount(sources, [text.column], text.encoding).bytes for sources in (text.sources, held_out))
        total = size // (1 if text.part is None else text.part.of) or None  # approximate bytes to encode
        dtype, frame = dtype_for(tokenizer.vocab_size), text.frame
        if frame is None:
            before = tokenizer.leading if tokenizer.adds_bos and not text.separate_sections else ()
            frame = before, () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        several = total is not None and total >= MIN_SHARED_BYTES and cores() > 1
        processes = jobs or (cores() if several else None)
        read = split_sections if text.part is None else part_sections
        writer = FolderWriter(out, plan, dtype=dtype, done=done)
        with bar("preparing", total, unit="bytes") as advance, writer.finishing():
            sections = _skip_done(read(text, plan["section"]), writer.finished_sections, advance)
            points, separate = tokenizer.split_points, text.separate_sections
            work = separate_jobs(sections) if separate else document_jobs(sections, points)
            with closing(encode_jobs(work, tokenizer, frame, dtype=dtype, processes=processes)) as encoded:
                for section, ids in encoded:
                    writer.add(section.side, ids, size=section.size, document=section.document)
        if text.part is None:
            check_sides(writer.shards, text.validation)
        return writer.shards

    return write_folder(out, plan, tokenizer, write=write)


def _plan(text: TextSource, shard_tokens: int, tokenizer: Tokenizer) -> Plan:
    """Everything that determines the bytes of the output, as JSON values."""
    split = text.validation
    plan = {
        "format": FORMAT,
        "version": 1 if text.separate_sections else VERSION,
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


def _skip_done(
    sections: Iterable[TextSection], finished: Mapping[Side, int], advance: Advance
) -> Iterator[TextSection]:
    """Mark the first `finished` wanted sections of each side as unwanted; `advance` is called with all sizes."""
    left = dict(finished)
    for section in sections:
        if section.wanted:
            advance(section.size)
            if left[section.side] > 0:
                left[section.side] -= 1
                section = section._replace(wanted=False)
        yield section


def parse_part(value: str) -> NumberedPart:
    """Parse the value of `--part`, such as '3/16'."""
    number, slash, of = value.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ConfigError(f"--part {value}: expected NUMBER/COUNT, such as 3/16 for the third of sixteen parts")
    return NumberedPart(int(number), int(of))


def part_sections(text: TextSource, section: int) -> Iterator[TextSection]:
    """Yield the sections of a part in reading order, with positions instead of document numbers. Sections of other
    parts in the same files are included but unwanted, because documents are encoded as a whole."""
    part, split = text.part, text.validation
    assert part is not None
    if isinstance(split, TailSplit):
        why = "where the tail of a text begins is known only at its end"
        raise DataError(f"part {part}: {why}; hold out by hash or by files")
    held_out = held_out_files(split)
    if "-" in (*text.sources, *held_out):
        raise DataError(f"part {part}: standard input can't be read by every machine; name a file")
    train = find_files(text.sources, text.column, text.encoding, log=warn, held_out=held_out)
    names = [*train, *find_files(held_out, text.column, text.encoding, log=warn)]
    owners_of = parts_of_files([stamp(name)[1] for name in names], part.of)
    for number, (name, owners) in enumerate(zip(names, owners_of, strict=True)):
        if part.number - 1 not in owners:
            continue
        side: Side = "train" if number < len(train) else "validation"
        at, begins = -1, True
        for at, document in enumerate(read_file(name, text.column, section, encoding=text.encoding)):
            if isinstance(split, HashSplit):
                side = side_by_hash(document.text, split)
            yield TextSection(
                side,
                document.text,
                size=utf8_size(document.text),
                document=number << FILE_BITS | at << 1 | document.ends,
                begins=begins,
                ends=document.ends,
                wanted=owners[(at >> STRIPE_BITS) % len(owners)] == part.number - 1,
            )
            begins = document.ends
        if at < 0 and name in (*text.sources, *held_out):
            raise DataError(f"{name}: contains no text")


def parts_of_files(sizes: Sequence[int], parts: int) -> list[range]:
    """Parts, counted from 0, that each file of these sizes belongs to, if all bytes are divided equally."""
    total, start, owners = max(1, sum(sizes)), 0, []
    for size in sizes:
        first = min(start * parts // total, parts - 1)
        last = max(first, ((start + size) * parts - 1) // total)
        owners.append(range(first, last + 1))
        start += size
    return owners


def merge(folders: Sequence[str | Path], out: str | Path) -> Shards:
    """Merge all parts of a text into the folder `out`, or complete an unfinished merge."""
    parts = sorted(map(_open_part, map(Path, folders)), key=lambda part: part.number.number)
    _check_complete(parts)
    folder, plan = parts[0].folder, {key: value for key, value in parts[0].plan.items() if key != "part"}
    for part in parts:
        if part.shards.index.tokenizer != part.plan["tokenizer"]:
            raise DataError(f"{part.folder}: damaged: its index and its plan name different tokenizers")
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        raise DataError(f"{folder}: damaged: {error}") from None
    if tokenizer.fingerprint != plan["tokenizer"]:
        raise DataError(f"{folder}: damaged: its tokenizer is not the one in its plan")
    for part in parts:
        part.shards.verify()
    out, split = Path(out), TypeAdapter[Split](Split).validate_python(plan["validation"])
    dtype = parts[0].shards.index.dtype
    total = np.dtype(dtype).itemsize * sum(shard.tokens for part in parts for shard in part.shards.index.shards)

    def write(done: list[Shard]) -> list[Shard]:
        writer = FolderWriter(out, plan, dtype=dtype, done=done)
        with bar("merging", total, unit="bytes") as advance:
            _copy_stripes(parts, writer, advance)
        check_sides(writer.shards, split)
        return writer.shards

    return write_folder(out, plan, tokenizer, write=write)


class PreparedPart(NamedTuple):
    """One part of a text on disk."""

    folder: Path
    number: NumberedPart
    plan: Plan
    shards: Shards


def _open_part(folder: Path) -> PreparedPart:
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
    return PreparedPart(folder, number, plan=plan, shards=Shards.open(folder, PART))


def _check_complete(parts: Sequence[PreparedPart]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.number.of != first.number.of:
            raise DataError(f"{part.folder} is part {part.number}, but {first.folder} is part {first.number}")
    for before, part in pairwise(parts):
        if before.number == part.number:
            raise DataError(f"part {part.number} is given twice: {before.folder} and {part.folder}")
    missing = sorted({*range(1, first.number.of + 1)} - {part.number.number for part in parts})
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DataError(f"of {first.number.of} parts {shown} {'is' if len(missing) == 1 else 'are'} missing")
    for part in parts[1:]:
        if keys := differing_keys(_comparable(first.plan), _comparable(part.plan)):
            what = {"tokenizer": "another tokenizer", "sources": "other sources"}.get(keys[0], f"another {keys[0]}")
            raise DataError(f"{part.folder}: was made with {what} than {first.folder}; prepare it again with the same")


def _comparable(plan: Plan) -> Plan:
    """Plan without the values that may differ between machines: the folders and times of files."""
    comparable = {key: value for key, value in plan.items() if key != "part"}
    for key in ("sources", "validation_sources"):
        comparable[key] = [[Path(str(name)).name, size] for name, size, *_ in plan.get(key, ())]
    return dict(sorted(comparable.items(), key=lambda item: item[0] != "tokenizer"))


class Stripe(NamedTuple):
    """Sections of one stripe on one side: ids (n,) in their stored dtype, and a table for `ShardWriter.extend`."""

    number: int
    side: Side
    ids: Array
    sections: Ids


def _copy_stripes(parts: Sequence[PreparedPart], writer: FolderWriter, advance: Advance) -> None:
    """Copy all stripes in reading order, except sections of finished shards."""
    finished, last = dict(writer.finished_sections), -1  # last: position of the previous section, on either side
    before = dict.fromkeys(SIDES, (-1, -1))  # side → position and document number of its previous section
    stripes = heapq.merge(*(_stripes(part.shards, side) for part in parts for side in SIDES), key=lambda s: s.number)
    with writer.finishing():
        for _, group in groupby(stripes, key=lambda stripe: stripe.number):
            both = list(group)
            last = _check_contiguous(last, np.sort(np.concatenate([stripe.sections[2] for stripe in both])))
            for stripe in both:
                advance(stripe.ids.nbytes)
                positions = stripe.sections[2]
                documents = _document_numbers(positions, *before[stripe.side])
                before[stripe.side] = int(positions[-1]), int(documents[-1])
                skipped = min(finished[stripe.side], len(positions))
                finished[stripe.side] -= skipped
                writer.extend(stripe.side, stripe.ids, np.stack([*stripe.sections[:2], documents])[:, skipped:])
    if last >= 0 and not last & 1:
        raise DataError(GAP)


def _stripes(part: Shards, side: Side) -> Iterator[Stripe]:
    for ids, sections in part.tokens(side).shards:
        numbers = sections[2] >> (STRIPE_BITS + 1)
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), sections.shape[1]]
        offsets = [*sections[0].tolist(), len(ids)]
        for start, stop in pairwise(bounds):
            first, last = offsets[start], offsets[stop]
            table = sections[:, start:stop] - np.array([[first], [0], [0]])
            yield Stripe(int(numbers[start]), side, ids=ids[first:last], sections=table)


def _document_numbers(positions: Ids, last: int, number: int) -> Ids:
    """Document numbers of a side's sections: a section begins a new document unless it continues the previous one."""
    before = np.concatenate([[last], positions[:-1]])
    continues = (positions >> 1 == (before >> 1) + 1) & (before & 1 == 0)
    return number + np.cumsum(~continues)


def _check_contiguous(last: int, positions: Ids) -> int:
    """Raise DataError if the positions of a stripe do not directly follow position `last`; return their last."""
    before = np.concatenate([[last], positions[:-1]])
    continues = positions >> 1 == (before >> 1) + 1
    begins_file = (positions % (1 << FILE_BITS) <= 1) & (before & 1 == 1) & (positions > before)
    if not (continues | begins_file).all():
        raise DataError(GAP)
    return int(positions[-1])
