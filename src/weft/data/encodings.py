"""Which bytes are text, and which encoding they are likely in where they aren't UTF-8."""

import codecs
import unicodedata
from itertools import pairwise

SAMPLE = 8192  # bytes of a file that are looked at
STARTS = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive, as .docx, .xlsx and .epub are",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF87a": "a GIF image",
    b"GIF89a": "a GIF image",
    b"\x7fELF": "a program (ELF)",
    b"SQLite format 3\0": "an SQLite database",
    b"PAR1": "Parquet without its suffix .parquet",
    b"\x1f\x8b": "gzip without its suffix .gz",
    b"\x28\xb5\x2f\xfd": "zstd without its suffix .zst",
    b"BZh91AY": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"7z\xbc\xaf": "a 7z archive",
}
WIDE = {  # with UTF-32 first: its mark begins as that of UTF-16 does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
KANA = ("HIRAGANA", "KATAKANA")
# an encoding → the script that text in it is written in; of two that fit equally well the first one is named
SCRIPTS = {
    "cp1252": ("LATIN",),
    "cp1250": ("LATIN",),
    "mac_roman": ("LATIN",),
    "cp1251": ("CYRILLIC",),
    "koi8_r": ("CYRILLIC",),
    "cp1253": ("GREEK",),
    "shift_jis": KANA,
    "euc_jp": KANA,
    "euc_kr": ("HANGUL",),
    "gb18030": ("CJK",),
    "big5": ("CJK",),
}
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
    if controls * 3 > len(start) or (controls * 50 > len(start) and not _begins_utf8(start)):
        return f"looks binary: {controls} of its first {len(start)} bytes are control characters"
    return None


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
        share = _share(decoded, scripts)
        if share > best:
            found, best = encoding, share
    return found


def damaged_utf8(text: bytes) -> bool:
    """Whether most characters beyond ASCII are UTF-8, so that what is wrong is wrong in places only."""
    decoded = text.decode("utf-8", "replace")
    beyond = sum(not character.isascii() for character in decoded)
    return beyond >= 2 * decoded.count("\ufffd") + 1


def _begins_utf8(start: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


def _controls(text: bytes) -> int:
    """How many bytes no text holds: not among them are a terminal's colours and the backspaces of a manual page."""
    return sum((byte < 32 and byte not in b"\t\n\v\f\r\b\x1b") or byte == 127 for byte in text)


def _share(text: str, scripts: tuple[str, ...]) -> float:
    """How plausible the characters beyond ASCII are as text of a script, from 0 to 1."""
    around = [(a, b, c) for (a, b), (_, c) in pairwise(pairwise(f" {text} ")) if not b.isascii()]
    if scripts == KANA and 5 * sum(_script(b) in KANA for _, b, _ in around) >= len(around):
        scripts = (*KANA, "CJK")  # Japanese has kana between its ideographs; without, they are not Japanese
    return sum(_points(a, b, c, scripts) for a, b, c in around) / max(1, len(around))


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
