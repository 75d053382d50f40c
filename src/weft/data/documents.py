"""Documents, streamed from the files that sources stand for.

A text file is cut into sections of at most `section` bytes, so that a file of one line of two gigabytes needs no more
memory than a short one; the sections of a file, put together, are the file (less a byte order mark). A row of JSONL,
CSV or Parquet is a document; one longer than 16 KiB is cut in the same way. Sections are what is held out or not;
encoded is the document as a whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.data.rows import TABLES, MissingColumnError, records, text_of
from weft.data.sources import files, hub_files
from weft.data.streams import blocks, decode, format_of
from weft.errors import DataError
from weft.progress import warn
from weft.text import builtin

SECTION = 16 * 1024  # bytes of text in a section, at most


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a section of a long one; `ends` where the document ends with it."""

    text: str
    ends: bool


def read(
    sources: Sequence[str], column: str = "text", *, section: int = SECTION, encoding: str = "utf-8"
) -> Iterator[Document]:
    """The documents of all sources, in order. What can't be read raises DataError when the iterator gets there."""
    found = False
    for name in files(sources, column, encoding, warn):
        held = False
        for document in read_file(name, column, section, encoding):
            held = True
            found = found or not document.text.isspace()
            yield document
        if not held and name in sources:
            raise DataError(f"{name}: contains no text")
    if not found:
        raise DataError(f"{', '.join(sources) or 'no source given'}: no text at all")


def read_file(name: str, column: str, section: int, encoding: str) -> Iterator[Document]:
    """The documents of one of those that `files` names; the last section of a file ends a document."""
    if name.startswith("builtin:"):
        for text in builtin.corpus(name).documents:
            yield from _sections_of(text, name)
    elif name.startswith("hub:"):
        for path in hub_files(name):
            yield from read_file(path, column, section, encoding)
    elif name != "-" and format_of(name) in TABLES:
        try:
            for number, row in records(name, [column], encoding=encoding):
                yield from _sections_of(text_of(row, column, f"{name}:{number}"), name)
        except MissingColumnError as error:
            advice = "choose one with data.column=NAME (weft prepare: --column NAME)"
            raise MissingColumnError(error.line, column, advice) from None
    else:
        yield from _cut(blocks(name, encoding), name, section)


def _sections_of(text: str, name: str) -> Iterator[Document]:
    """The sections of a document that is in memory as a whole; nearly always it is one."""
    if "\0" in text:
        raise DataError(f"{name}: a document contains a NUL character, at its character {text.index(chr(0))}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no text can hold
        raise DataError(f"{name}: a document contains a lone surrogate, at its character {error.start}") from None
    yield from _cut((encoded,), name, SECTION)


def _cut(blocks: Iterable[bytes], name: str, section: int) -> Iterator[Document]:
    """One document's bytes as sections of at most `section` bytes; the last one `ends`."""
    assert section >= 16
    waiting = b""
    offset = 0  # of `waiting` in the text
    for block in blocks:
        waiting += block
        start = 0
        while len(waiting) - start > section:
            stop = _cut_point(waiting, start, section)
            yield Document(decode(waiting[start:stop], name, offset + start), ends=False)
            start = stop
        waiting = waiting[start:]
        offset += start
    if waiting:
        yield Document(decode(waiting, name, offset), ends=True)


def _cut_point(text: bytes, start: int, section: int) -> int:
    """Where the section from `start` ends: after a blank line, a line, before a space, or wherever it must.

    Only the second half of the section is searched, so that sections don't become short.
    """
    end = start + section
    half = start + section // 2
    blank = max(text.rfind(b"\n\n", half, end) + 2, text.rfind(b"\n\r\n", half, end) + 3)
    if blank >= half + 2:
        return blank
    if (line := text.rfind(b"\n", half, end)) >= 0:
        return line + 1
    if (space := max(text.rfind(b" ", half, end), text.rfind(b"\t", half, end))) > start:
        return space
    stop = end
    while stop > end - 3 and text[stop] & 0xC0 == 0x80:  # not inside a UTF-8 character
        stop -= 1
    if text[stop - 1 : stop + 1] == b"\r\n":
        stop -= 1
    return stop
