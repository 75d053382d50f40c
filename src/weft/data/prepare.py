"""From documents to token shards: read, split, encode and write at the same time, in bounded memory.

A run that was killed goes over the text again, which is quick, and encodes only what no finished shard holds
(`folder.py`). However many processes encode, the bytes are the same.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from weft.data.amount import amount
from weft.data.config import FilesSplit, TextSource
from weft.data.encode import apart, encoded, together
from weft.data.encodings import is_utf8
from weft.data.folder import FORMAT, Plan, Writers, read_plan, written
from weft.data.parts import part_sections
from weft.data.shards import Shard, Shards, Side, dtype_for
from weft.data.sources import stamps
from weft.data.split import Section, check_sides, section_for, split_sections
from weft.progress import Advance, bar
from weft.text.frame import Ids
from weft.text.tokenizer import Tokenizer
from weft.workers import cores

VERSION = 2  # of how text becomes tokens; in 1, weft 0.1's, each section was encoded as a text of its own
SHARD_TOKENS = 64 * 1024 * 1024
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
        dtype, total = dtype_for(tokenizer.vocab_size), _total(text)
        several = total is not None and total >= MIN_SHARED_BYTES and cores() > 1
        processes = jobs or (cores() if several else None)
        read = split_sections if text.part is None else part_sections
        writers = Writers(out, plan, dtype, done)
        with bar("preparing", total, unit="bytes") as advance, writers.writing():
            sections = _remaining(read(text, plan["section"]), writers.held, advance)
            work = apart(sections) if text.apart else together(sections, tokenizer.joints)
            with closing(encoded(work, tokenizer, _frame(text, tokenizer), dtype, processes)) as rows:
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
        "sources": stamps(text.sources),
        "validation": split.model_dump(),
        "validation_sources": stamps(split.sources) if isinstance(split, FilesSplit) else [],
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


def _frame(text: TextSource, tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """The ids before and after each document."""
    if text.frame is not None:
        return text.frame
    before = tokenizer.leading if tokenizer.opens and not text.apart else ()
    return before, () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def _remaining(sections: Iterable[Section], held: Mapping[Side, int], advance: Advance) -> Iterator[Section]:
    """Wanted is what no finished shard holds: so many of the first sections of each side. `advance` gets all bytes."""
    left = dict(held)
    for section in sections:
        if section.wanted:
            advance(section.size)
            if left[section.side] > 0:
                left[section.side] -= 1
                section = replace(section, wanted=False)
        yield section


def _total(text: TextSource) -> int | None:
    """About how many bytes of text there are to encode."""
    held = text.validation.sources if isinstance(text.validation, FilesSplit) else ()
    total = sum(amount(given, [text.column], text.encoding).bytes for given in (text.sources, held))
    return total // (1 if text.part is None else text.part.of) or None
