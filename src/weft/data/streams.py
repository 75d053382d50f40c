"""The bytes of a file, unpacked and checked, a block at a time; as lines, and as characters.

Which bytes are text, and which encoding they are likely in where they aren't UTF-8.
"""

import codecs
import gzip
import io
import os
import shlex
import sys
import tempfile
import tomllib
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import IO

import zstandard

from weft.errors import DataError
from weft.progress import warn
from weft.storage.untrusted import refuse_beyond

BLOCK = 1024 * 1024  # bytes read at once
MAX_ROW_BYTES = 256 * 1024 * 1024  # of JSON or CSV: a row has to be in memory as a whole
PACKED = (".gz", ".zst")
SAMPLE = 8192  # bytes of a file that are looked at
ANNOUNCED_BYTES = 1 << 28  # unpacked, beyond which somebody who waits is told
MAX_UNPACKED_BYTES = 1 << 30  # that any packed file may become
MAX_UNPACKED_RATIO = 64  # times as many bytes as a larger one may; text becomes three to ten times as many


def format_of(name: str) -> str:
    """The suffix of the format, without a .gz or .zst after it; "" when there is none."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def blocks(name: str, encoding: str = "utf-8") -> Iterator[bytes]:
    """A file's text as UTF-8, decompressed, a megabyte at a time, checked for bytes that no text holds."""
    offset, shown = 0, _shown(name)
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as stream:
            plain = unpacked(stream, name)
            start = next(plain, b"")
            other = wide(start[:SAMPLE])
            if other is not None and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
                raise DataError(f"{shown}: is {other.upper()} text; {_other_encoding(name, other)}")
            what = no_text(start[:SAMPLE])
            if what is not None and what.startswith("looks like"):  # where a byte isn't text, reading says which
                raise DataError(f"{shown}: {what}, not text")
            plain = chain([start] if start else [], plain)
            for block in plain if is_utf8(encoding) else _transcoded(plain, name, encoding):
                if (zero := block.find(0)) >= 0:
                    raise DataError(f"{shown}: looks binary, not text: a NUL byte at byte {offset + zero}")
                yield block.removeprefix(codecs.BOM_UTF8) if offset == 0 else block
                offset += len(block)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None


def _transcoded(plain: Iterable[bytes], name: str, encoding: str) -> Iterator[bytes]:
    decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
    for block in chain(plain, [b""]):
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:  # UTF-16 has one without a place
            wrong = f"not valid {encoding} at byte {offset - held + getattr(error, 'start', 0)}"
            raise DataError(f"{_shown(name)}: {wrong}; is data.encoding its encoding?") from None
        if text:
            yield text.encode("utf-8", "surrogatepass")
        offset += len(block)


@lru_cache(maxsize=1 << 16)
def what_is_no_text(name: str, _size: int, _changed: int) -> str | None:
    """What a file looks like, by its beginning, where that isn't text; None for text and for what can't be read.
    Remembered while a file stays as it is, for sources are listed more than once."""
    try:
        with open(name, "rb") as stream:
            start = next(unpacked(stream, name, SAMPLE), b"")[:SAMPLE]
    except (OSError, DataError):
        return None  # reading it says what is wrong
    return no_text(start)


def _shown(name: str) -> str:
    return "standard input" if name == "-" else name


def unpacked(stream: IO[bytes], name: str, at_once: int | None = None) -> Iterator[bytes]:
    """The bytes of an open file, unpacked as its suffix says."""
    if not name.lower().endswith(PACKED):
        yield from iter(lambda: stream.read(at_once or BLOCK), b"")
        return
    unpack, total = _ungzip if name.lower().endswith(".gz") else _unzstd, 0
    size = os.fstat(stream.fileno()).st_size
    for block in unpack(stream, name):
        total += len(block)
        check_unpacked(total, size, name)
        if total > ANNOUNCED_BYTES:
            warn(f"{name}: its {size:,} bytes become more than {ANNOUNCED_BYTES >> 20:,} MiB of text; unpacking all")
        yield block


def check_unpacked(total: int, size: int, name: str) -> None:
    """Refuse a packed file of `size` bytes that becomes implausibly many."""
    usual = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size)
    if total > usual:
        what = f"{name}: its {size:,} bytes become more than {usual >> 20:,} MiB when they are unpacked"
        refuse_beyond(total, usual, what, kind=DataError)


def _ungzip(stream: IO[bytes], name: str) -> Iterator[bytes]:
    given = 0
    try:
        with gzip.GzipFile(fileobj=stream, mode="rb") as inner:
            for block in iter(lambda: inner.read(BLOCK), b""):
                given += len(block)
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name}: truncated or damaged gzip after {given} bytes of text: {error}") from None


def _unzstd(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Frame after frame. The input goes in 4 KiB at a time, which bounds what one step can give out."""
    waiting = stream.read(4096)
    whole = True  # an empty file is no frame, hence not a broken one
    try:
        while waiting:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while waiting and not frame.eof:
                if block := frame.decompress(waiting):
                    yield block
                waiting = frame.unused_data or stream.read(4096) if frame.eof else stream.read(4096)
            whole = frame.eof
    except zstandard.ZstdError as error:
        raise DataError(f"{name}: damaged zstd: {error}") from None
    if not whole:
        raise DataError(f"{name}: truncated zstd: it ends inside a frame")


def seekable(name: str) -> IO[bytes]:
    """A Parquet file is read from its end, so a compressed one is unpacked to a temporary file first."""
    if not name.lower().endswith(PACKED):
        return open(name, "rb")
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    with open(name, "rb") as stream:
        copy.writelines(unpacked(stream, name))
    copy.seek(0)
    return copy


def decode(text: bytes, name: str, offset: int) -> str:
    """Bytes as text; `offset` is their place in the file, for the message if they aren't UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {offset + error.start} (0x{text[error.start]:02x})"
        wrong = f"not valid UTF-8 at {where}"
        decoded = text.decode("utf-8", "replace")
        beyond = sum(not character.isascii() for character in decoded)
        if no_text(text) is not None:
            wrong = f"looks binary, not text: invalid UTF-8 at {where}"
        elif beyond > 2 * decoded.count("\ufffd"):  # most characters beyond ASCII are UTF-8
            wrong += ", though the text around it is; put that place right"
        elif (encoding := guess(text)) is None:
            wrong += "; give its encoding with data.encoding, for instance latin1"
        else:
            wrong += f"; it looks like {encoding}: {_other_encoding(name, encoding)}"
        raise DataError(f"{_shown(name)}: {wrong}") from None


def _other_encoding(name: str, encoding: str) -> str:
    """How a file in another encoding is read, and the command that makes UTF-8 of it."""
    source = "FILE" if name == "-" else shlex.quote(name)
    setting = f"set data.encoding={encoding} for all files (weft prepare, evaluate: --encoding {encoding})"
    command = f"iconv -f {_TABLE['iconv'].get(encoding, encoding)} -t utf-8 {source} > utf-8.txt"
    return f"{setting}, or save it as UTF-8: {command}"


def lines(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """Lines with their ends, as text. A line ends at \\n alone: a \\r may be part of a quoted field."""
    pieces: list[bytes] = []  # of the line that no block has ended yet
    held, offset, number = 0, 0, 1
    for block in blocks(name, encoding):
        for line in io.BytesIO(block):
            pieces.append(line)
            held += len(line)
            if held > MAX_ROW_BYTES:
                raise DataError(f"{name}: line {number} is longer than {MAX_ROW_BYTES >> 20} MiB, too long for one row")
            if line.endswith(b"\n"):
                yield decode(b"".join(pieces), name, offset)
                offset += held
                number += 1
                pieces, held = [], 0
    if pieces:
        yield decode(b"".join(pieces), name, offset)


def characters(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """A file as text, a block at a time; a character that a block's end cuts goes to the next one."""
    utf8, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks(name, encoding), [b""]):
        cut, _ = utf8.getstate()
        try:
            text = utf8.decode(block, final=not block)
        except UnicodeDecodeError:
            text = decode(cut + block, name, offset - len(cut))  # raises, with the place
        if text:
            yield text
        offset += len(block)


_TABLE = tomllib.loads(Path(__file__).with_name("streams.toml").read_text(encoding="utf-8"))
STARTS: dict[bytes, str] = {start.encode("latin-1"): what for start, what in _TABLE["starts"].items()}
SCRIPTS = {encoding: tuple(scripts.split()) for encoding, scripts in _TABLE["scripts"].items()}
ICONV: dict[str, str] = _TABLE["iconv"]
WIDE = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")
WIDE |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")  # last: UTF-32's mark begins as this does
KANA = ("HIRAGANA", "KATAKANA")
MARKS = "“”‘’„‚–—…«»·°§¿¡€£\N{NO-BREAK SPACE}、。，！？：；「」『』（）《》"  # found in text of any script
PLAUSIBLE = 0.6  # of the characters beyond ASCII, at least


def is_utf8(encoding: str) -> bool:
    """Whether an encoding's name is one of those of UTF-8."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def no_text(start: bytes) -> str | None:
    """What a file that starts so looks like where it isn't text; None where it is, in whatever encoding."""
    for magic, what in STARTS.items():
        if start.startswith(magic):
            return f"looks like {what}"
    if wide(start) is not None:
        return None
    if 0 in start:
        return f"looks binary: a NUL byte at byte {start.index(0)}"
    controls = _controls(start)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
        allowed = len(start) // 3
    except UnicodeDecodeError:
        allowed = len(start) // 50
    what = f"looks binary: {controls} of its first {len(start)} bytes are control characters"
    return what if controls > allowed else None


def wide(start: bytes) -> str | None:
    """UTF-16 or UTF-32, where a text starts with such a byte order mark or every second byte is 0."""
    for mark, encoding in WIDE.items():
        if start.startswith(mark):
            return encoding
    half = len(start) // 2
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros, others = start[first : 2 * half : 2], start[1 - first : 2 * half : 2]
        if half >= 4 and zeros.count(0) > 0.7 * half and 0 not in others and not _controls(others):
            return encoding
    return None


def guess(text: bytes) -> str | None:
    """The encoding that bytes which aren't UTF-8 are likely in: one that decodes them all, to letters of its script."""
    found, best = None, PLAUSIBLE
    for encoding, scripts in SCRIPTS.items():
        try:
            decoded = codecs.getincrementaldecoder(encoding)().decode(text)  # the end may be inside a character
        except UnicodeDecodeError:
            continue
        around = [(a, b, c) for (a, b), (_, c) in pairwise(pairwise(f" {decoded} ")) if not b.isascii()]
        if scripts == KANA and 5 * sum(_script(b) in KANA for _, b, _ in around) >= len(around):
            scripts = (*KANA, "CJK")  # Japanese has kana between its ideographs; without, they are not Japanese
        # how plausible the characters beyond ASCII are as text of a script, from 0 to 1
        share = sum(_points(a, b, c, scripts) for a, b, c in around) / max(1, len(around))
        if share > best:
            found, best = encoding, share
    return found


def _controls(text: bytes) -> int:
    """How many bytes no text holds: not among them are a terminal's colours and the backspaces of a manual page."""
    return sum((byte < 32 and byte not in b"\t\n\v\f\r\b\x1b") or byte == 127 for byte in text)


def _points(before: str, character: str, after: str, scripts: tuple[str, ...]) -> float:
    """1 for a character where it can be expected, 0 where not, less than 1 where it is rare."""
    if character in MARKS:
        return 1.0
    script = _script(character)
    if script not in scripts or (character.isupper() and before.islower()):
        return 0.0
    ascii_beside = any(other.isascii() and other.isalpha() for other in (before, after))
    if script == "LATIN":  # among plain letters, or a word of its own
        return float(ascii_beside or not (before.isalpha() or after.isalpha()))
    if script in ("CYRILLIC", "GREEK"):  # never among Latin letters, and mostly small
        return 0.0 if ascii_beside else 0.7 if character.isupper() else 1.0
    return 0.5 if ascii_beside else 1.0


def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
