"""A text in parts, each for a machine of its own: which part has which section, and where that is in the whole text.

Files are lined up in reading order, and the parts are equal shares of all their bytes. A file that lies in one share
belongs to that part, and no other machine reads it. One that lies in several is read by all of them, which is quick,
and its sections are dealt out in stripes. Nothing but the names, sizes and contents of the files decides, so every
machine comes to the same division by itself.
"""

from collections.abc import Iterator, Sequence

from weft.data.config import FilesSplit, HashSplit, NumberedPart, TailSplit, TextSource
from weft.data.documents import read_file
from weft.data.shards import Side
from weft.data.sources import files, stamp
from weft.data.split import Section, side_by_hash
from weft.errors import ConfigError, DataError
from weft.files import utf8_size
from weft.progress import warn

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
    for number, (name, owners) in enumerate(
        zip(names, shares([stamp(name)[1] for name in names], part.of), strict=True)
    ):
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
