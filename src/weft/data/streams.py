"""Read a file in blocks, decompressed and checked; as lines, and as characters.

Also decides whether bytes are text, and guesses the encoding of text that is not UTF-8.
"""

import codecs
import gzip
import io
import os
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

from weft.errors import DataError, download_first, os_errors, quoted, suggestion
from weft.progress import warn
from weft.storage.untrusted import refuse_beyond

BLOCK = 1024 * 1024  # bytes per read
MAX_ROW_BYTES = 256 * 1024 * 1024  # of JSON or CSV: a whole row must be in memory
COMPRESSED = (".gz", ".zst")
SAMPLE = 8192  # bytes of a file used to recognise its content
ANNOUNCED_BYTES = 1 << 28  # decompressed bytes after which a message explains the wait
MAX_DECOMPRESSED_BYTES = 1 << 30  # decompressed size allowed for any file
MAX_DECOMPRESSED_RATIO = 64  # ratio to the compressed size allowed above that; text has a ratio of 3 to 10


def format_of(name: str) -> str:
    """Suffix of the format, ignoring a trailing .gz or .zst; "" if there is none."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def no_such_file(source: str) -> DataError:
    """Return the error for a missing file, which suggests the nearest name in its folder."""
    if "://" in source:
        return DataError(download_first(source))
    folder = os.path.dirname(source)
    try:
        nearby = [os.path.join(folder, name) for name in os.listdir(folder or ".") if name != "runs"]
    except OSError:
        nearby = []
    near = suggestion(source, nearby, what="files here")
    return DataError(f"{source or repr(source)}: no such file{near and f'; {near}'}")


def blocks(name: str, encoding: str = "utf-8") -> Iterator[bytes]:
    """Yield a file's text as UTF-8, decompressed, in blocks of a megabyte; DataError if it is not text."""
    offset, shown = 0, _shown(name)
    if name != "-" and not os.path.exists(name):
        raise no_such_file(name)
    with os_errors(name), nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as stream:
        plain = decompress(stream, name)
        start = next(plain, b"")
        wide = detect_wide_encoding(start[:SAMPLE])
        if wide is not None and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
            raise DataError(f"{shown}: is {wide.upper()} text; {_encoding_advice(name, wide)}")
        what = describe_non_text(start[:SAMPLE])
        if what is not None and what.startswith("looks like"):  # a single invalid byte is reported below
            raise DataError(f"{shown}: {what}, not text")
        plain = chain([start] if start else [], plain)
        for block in plain if is_utf8(encoding) else _transcoded(plain, name, encoding):
            if (zero := block.find(0)) >= 0:
                raise DataError(f"{shown}: looks binary, not text: a NUL byte at byte {offset + zero}")
            yield block.removeprefix(codecs.BOM_UTF8) if offset == 0 else block
            offset += len(block)


def _transcoded(plain: Iterable[bytes], name: str, encoding: str) -> Iterator[bytes]:
    decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
    for block in chain(plain, [b""]):
        buffered = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:  # one of UTF-16's errors has no `start`
            what = f"not valid {encoding} at byte {offset - buffered + getattr(error, 'start', 0)}"
            raise DataError(f"{_shown(name)}: {what}; is data.encoding its encoding?") from None
        if text:
            yield text.encode("utf-8", "surrogatepass")
        offset += len(block)


@lru_cache(maxsize=1 << 16)
def describe_non_text_file(name: str, _size: int, _changed: int) -> str | None:
    """Describe a file that is not text, from its first bytes; None for text, and for a file that can't be read. Cached
    by size and time of change, because sources are listed more than once."""
    try:
        with open(name, "rb") as stream:
            start = next(decompress(stream, name, SAMPLE), b"")[:SAMPLE]
    except (OSError, DataError):
        return None  # reading the file will report it
    return describe_non_text(start)


def _shown(name: str) -> str:
    return "standard input" if name == "-" else name


def decompress(stream: IO[bytes], name: str, read_size: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of an open file, decompressed if its suffix is .gz or .zst."""
    if not name.lower().endswith(COMPRESSED):
        yield from iter(lambda: stream.read(read_size or BLOCK), b"")
        return
    status, total = os.fstat(stream.fileno()), 0
    size = status.st_size
    if read_size is None:
        _check_expansion(name, size, status.st_mtime_ns)
    for block in _decompressed(stream, name):
        total += len(block)
        check_decompressed(total, size, name)
        if total > ANNOUNCED_BYTES:
            what = f"{size:,} compressed bytes contain more than {ANNOUNCED_BYTES >> 20:,} MiB of text"
            warn(f"{name}: {what}; decompressing all of it")
        yield block


@lru_cache(maxsize=1024)
def _check_expansion(name: str, size: int, _changed: int) -> None:
    """Refuse a small file that expands implausibly, before any of its text is processed: that takes a few seconds."""
    total = 0
    with open(name, "rb") as stream:
        for block in _decompressed(stream, name):
            total += len(block)
            check_decompressed(total, size, name)
            if stream.tell() > MAX_DECOMPRESSED_BYTES // MAX_DECOMPRESSED_RATIO:
                return


def _decompressed(stream: IO[bytes], name: str) -> Iterator[bytes]:
    return (_gunzip if name.lower().endswith(".gz") else _unzstd)(stream, name)


def check_decompressed(total: int, size: int, name: str) -> None:
    """Refuse a compressed file of `size` bytes whose decompressed size is implausible."""
    default = max(MAX_DECOMPRESSED_BYTES, MAX_DECOMPRESSED_RATIO * size)
    if total > default:
        what = f"{name}: {size:,} compressed bytes contain more than {default >> 20:,} MiB"
        refuse_beyond(total, default, what, kind=DataError)


def _gunzip(stream: IO[bytes], name: str) -> Iterator[bytes]:
    total = 0
    try:
        with gzip.GzipFile(fileobj=stream, mode="rb") as inner:
            for block in iter(lambda: inner.read(BLOCK), b""):
                total += len(block)
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise DataError(f"{name}: truncated or damaged gzip after {total} bytes of text") from None


def _unzstd(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Decompress frame by frame, from 4 KiB of input at a time, which bounds the output of one call."""
    data = stream.read(4096)
    complete = True  # an empty file has no frame, hence no truncated one
    try:
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while data and not frame.eof:
                if block := frame.decompress(data):
                    yield block
                data = frame.unused_data or stream.read(4096) if frame.eof else stream.read(4096)
            complete = frame.eof
    except zstandard.ZstdError as error:
        raise DataError(f"{name}: damaged zstd: {error}") from None
    if not complete:
        raise DataError(f"{name}: truncated zstd: it ends inside a frame")


def open_seekable(name: str) -> IO[bytes]:
    """Open a file for random access, as Parquet needs; a compressed one is decompressed to a temporary file."""
    if not name.lower().endswith(COMPRESSED):
        return open(name, "rb")
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    with open(name, "rb") as stream:
        copy.writelines(decompress(stream, name))
    copy.seek(0)
    return copy


def decode(text: bytes, name: str, offset: int) -> str:
    """Decode UTF-8; `offset` locates the bytes in the file for an error message."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {offset + error.start} (0x{text[error.start]:02x})"
        what = f"not valid UTF-8 at {where}"
        decoded = text.decode("utf-8", "replace")
        non_ascii = sum(not character.isascii() for character in decoded)
        if describe_non_text(text) is not None:
            what = f"looks binary, not text: invalid UTF-8 at {where}"
        elif non_ascii > 2 * decoded.count("\ufffd"):  # most non-ASCII characters are valid UTF-8
            what += ", although the text around it is; correct this byte"
        elif (encoding := guess_encoding(text)) is None:
            what += "; give its encoding with data.encoding, for instance latin1"
        else:
            what += f"; it looks like {encoding}: {_encoding_advice(name, encoding)}"
        raise DataError(f"{_shown(name)}: {what}") from None


def _encoding_advice(name: str, encoding: str) -> str:
    """Advice on reading a file in another encoding: the setting, and the command that converts it to UTF-8."""
    source = "FILE" if name == "-" else quoted(name)
    setting = f"set data.encoding={encoding} for all files (weft prepare, evaluate: --encoding {encoding})"
    command = f"iconv -f {_TABLE['iconv'].get(encoding, encoding)} -t utf-8 {source} > utf-8.txt"
    return f"{setting}, or save it as UTF-8: {command}"


def lines(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines of a file with their ends. Only \\n ends a line: a \\r may be part of a quoted field."""
    pieces: list[bytes] = []  # of a line that continues in the next block
    size, offset, number = 0, 0, 1
    for block in blocks(name, encoding):
        for line in io.BytesIO(block):
            pieces.append(line)
            size += len(line)
            if size > MAX_ROW_BYTES:
                raise DataError(f"{name}: line {number} is longer than {MAX_ROW_BYTES >> 20} MiB, too long for one row")
            if line.endswith(b"\n"):
                yield decode(b"".join(pieces), name, offset)
                offset += size
                number += 1
                pieces, size = [], 0
    if pieces:
        yield decode(b"".join(pieces), name, offset)


def characters(name: str, encoding: str = "utf-8") -> Iterator[str]:
    """Yield a file's text in blocks; a character that spans two blocks is in the second."""
    utf8, offset = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks(name, encoding), [b""]):
        partial, _ = utf8.getstate()
        try:
            text = utf8.decode(block, final=not block)
        except UnicodeDecodeError:
            text = decode(partial + block, name, offset - len(partial))  # raises DataError with the offset
        if text:
            yield text
        offset += len(block)


_TABLE = tomllib.loads(Path(__file__).with_name("streams.toml").read_text(encoding="utf-8"))
MAGIC: dict[bytes, str] = {start.encode("latin-1"): what for start, what in _TABLE["starts"].items()}
SCRIPTS = {encoding: tuple(scripts.split()) for encoding, scripts in _TABLE["scripts"].items()}
WIDE = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")
WIDE |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")  # last: UTF-32's mark begins with UTF-16's
KANA = ("HIRAGANA", "KATAKANA")
MARKS = "“”‘’„‚–—…«»·°§¿¡€£\N{NO-BREAK SPACE}、。，！？：；「」『』（）《》"  # occur in text of any script
MIN_PLAUSIBILITY = 0.6  # of the non-ASCII characters, for an encoding to be suggested


def is_utf8(encoding: str) -> bool:
    """Return whether an encoding's name is one of UTF-8's."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def describe_non_text(start: bytes) -> str | None:
    """Describe a file that begins with these bytes if it is not text; None if it is text in any encoding."""
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            return f"looks like {what}"
    if detect_wide_encoding(start) is not None:
        return None
    if 0 in start:
        return f"looks binary: a NUL byte at byte {start.index(0)}"
    controls = _count_controls(start)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
        allowed = len(start) // 3
    except UnicodeDecodeError:
        allowed = len(start) // 50
    what = f"looks binary: {controls} of its first {len(start)} bytes are control characters"
    return what if controls > allowed else None


def detect_wide_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if a text begins with its byte order mark, or if every second byte is 0."""
    for mark, encoding in WIDE.items():
        if start.startswith(mark):
            return encoding
    half = len(start) // 2
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros, others = start[first : 2 * half : 2], start[1 - first : 2 * half : 2]
        if half >= 4 and zeros.count(0) > 0.7 * half and 0 not in others and not _count_controls(others):
            return encoding
    return None


def guess_encoding(text: bytes) -> str | None:
    """Guess the encoding of bytes that are not UTF-8: one that decodes all of them, mostly to letters of its script."""
    guess, best = None, MIN_PLAUSIBILITY
    for encoding, scripts in SCRIPTS.items():
        try:
            decoded = codecs.getincrementaldecoder(encoding)().decode(text)  # the text may end inside a character
        except UnicodeDecodeError:
            continue
        contexts = [(a, b, c) for (a, b), (_, c) in pairwise(pairwise(f" {decoded} ")) if not b.isascii()]
        if scripts == KANA and 5 * sum(_script(b) in KANA for _, b, _ in contexts) >= len(contexts):
            scripts = (*KANA, "CJK")  # Japanese has kana between its ideographs; ideographs alone are not Japanese
        score = sum(_plausibility(context, scripts) for context in contexts) / max(1, len(contexts))
        if score > best:
            guess, best = encoding, score
    return guess


def _count_controls(text: bytes) -> int:
    """Count control characters, except white space, a terminal's escape and the backspace of manual pages."""
    return sum((byte < 32 and byte not in b"\t\n\v\f\r\b\x1b") or byte == 127 for byte in text)


def _plausibility(context: tuple[str, str, str], scripts: tuple[str, ...]) -> float:
    """Plausibility, 0 to 1, of a non-ASCII character between its neighbours in text of these scripts."""
    before, character, after = context
    if character in MARKS:
        return 1.0
    script = _script(character)
    if script not in scripts or (character.isupper() and before.islower()):
        return 0.0
    ascii_beside = any(other.isascii() and other.isalpha() for other in (before, after))
    if script == "LATIN":  # beside an ASCII letter, or a word of one letter
        return float(ascii_beside or not (before.isalpha() or after.isalpha()))
    if script in ("CYRILLIC", "GREEK"):  # never beside a Latin letter, and mostly lower case
        return 0.0 if ascii_beside else 0.7 if character.isupper() else 1.0
    return 0.5 if ascii_beside else 1.0


def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
