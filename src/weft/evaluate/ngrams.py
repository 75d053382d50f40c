"""Hashes of n-grams of words or characters, for a million bytes at a time: numpy alone, no loop over words."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids

Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]

DROPPED, BETWEEN, KEPT = 0, 1, 2  # punctuation; white space; what words are made of
UNKNOWN = b"\x01"  # in the place of unknown words, which aren't known to be the same
LONG = 12  # characters a word has on average where a text isn't written in words
LETTER, PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd, so that products lose nothing


class Unit(NamedTuple):
    """What n-grams are made of, and how many of them."""

    name: str
    length: int

    def __str__(self) -> str:
        return f"{self.length}-grams of {self.name}"


class NGrams(NamedTuple):
    """N-grams of a text: their hashes, and the bytes at which each begins and ends. (N,) each."""

    hashes: Hashes
    firsts: Ids
    lasts: Ids


WORDS, CHARACTERS = Unit("words", 13), Unit("characters", 50)


def words_are_long(text: bytes) -> bool:
    """Whether a text isn't written in words with spaces between them."""
    raw, kind = _classified(text)
    letters = kind == KEPT
    begins = letters & (raw & 0xC0 != 0x80)
    words = _begins(kind, np.flatnonzero(letters)).sum()
    return bool(words) and begins.sum() / words > LONG


def ngrams(text: bytes, documents: Ids, unit: Unit, every: int = 1) -> NGrams:
    """The n-grams of a text in UTF-8 whose documents begin at these bytes, of which `every` so many-th hash is kept.

    None goes over the end of a document, which white space has to follow, and none holds an unknown word. A document
    that is shorter than an n-gram has one, all of it.
    """
    raw, kind = _classified(text)
    places = np.flatnonzero(kind == KEPT)
    if not len(places):
        return NGrams(np.zeros(0, np.uint64), *np.zeros((2, 0), np.int64))
    letters = raw[places]
    begins = _begins(kind, places) if unit is WORDS else letters & 0xC0 != 0x80
    starts = np.flatnonzero(begins)
    inside = np.arange(len(places)) - np.repeat(starts, np.diff(np.append(starts, len(places))))
    units = _mixed(np.add.reduceat((letters + np.uint64(1)) * LETTERS[inside & 255], starts))
    first = places[starts]
    last = places[np.append(starts[1:], len(places)) - 1] + 1
    unknown = np.concatenate([[0], np.cumsum(np.maximum.reduceat(letters == UNKNOWN[0], starts))])
    document = np.searchsorted(documents, first, side="right")

    n = unit.length
    count = max(0, len(units) - n + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(n):  # Horner's rule, for all n-grams at once
        hashes = hashes * PLACE + units[place : place + count]
    whole = (document[n - 1 :] == document[:count]) & (unknown[n:] == unknown[:count]) if count else np.zeros(0, bool)
    short = _short(units, document, unknown, n)
    found = NGrams(
        np.concatenate([_mixed(hashes[whole]), short.hashes]),
        np.concatenate([first[:count][whole], first[short.firsts]]),
        np.concatenate([last[n - 1 :][whole] if count else last[:0], last[short.lasts]]),
    )
    kept = np.ones(len(found.hashes), dtype=bool) if every == 1 else found.hashes % np.uint64(every) == 0
    order = np.argsort(found.firsts[kept], kind="stable")
    return NGrams(*(each[kept][order] for each in found))


def _short(units: Hashes, document: Ids, unknown: Ids, n: int) -> NGrams:
    """Documents of fewer than n units, each as a whole: the hash, and the numbers of its first and last unit."""
    begins = np.flatnonzero(np.diff(document, prepend=-1))
    ends = np.append(begins[1:], len(document))
    sizes = ends - begins
    fine = (sizes < n) & (unknown[ends] == unknown[begins])
    inside = np.arange(len(units)) - np.repeat(begins, sizes)
    sums = np.add.reduceat(units * POWERS[np.minimum(inside, len(POWERS) - 1)], begins)
    hashes = _mixed(sums[fine] + sizes[fine].astype(np.uint64) * LETTER)
    return NGrams(hashes, begins[fine], ends[fine] - 1)


def _begins(kind: Bytes, places: Ids) -> npt.NDArray[np.bool_]:
    """Which of the kept bytes begin a word: white space lies between it and the one before."""
    spaces = np.cumsum(kind == BETWEEN)[places]
    return np.diff(spaces, prepend=-1) != 0


def _classified(text: bytes) -> tuple[Bytes, Bytes]:
    """The bytes of a text in lower case, as many as before, and of what kind each is."""
    raw = np.frombuffer(_lower(text), dtype=np.uint8)
    kind = KINDS[raw]
    if not text.isascii() and len(raw) > 2:
        one, two, three = raw[:-2], raw[1:-1], raw[2:]
        general = (one == 0xE2) & ((two == 0x80) | (two == 0x81))  # U+2000 … U+207F
        quotes = general & (two == 0x80) & (three >= 0x98) & (three <= 0x9F)
        wide = ((one == 0xE3) & (two == 0x80)) | ((one == 0xEF) & (two == 0xBC) & (three <= 0x8F))  # 、。「」，！
        for where, what in ((general, BETWEEN), (quotes | wide, DROPPED)):
            at = np.flatnonzero(where)
            kind[at] = kind[at + 1] = kind[at + 2] = what
    return raw, kind


def _lower(text: bytes) -> bytes:
    """Lower case; a letter whose lower case has another size stays, so that bytes keep their places."""
    if text.isascii():
        return text.lower()
    words = text.decode("utf-8", "replace")
    lower = words.lower().encode()
    if len(lower) == len(text):
        return lower
    small = {letter: letter.lower() for letter in set(words)}
    same = {ord(a): b for a, b in small.items() if len(a.encode()) == len(b.encode())}
    return words.translate(same).encode()


def _mixed(hashes: Hashes) -> Hashes:
    """Every bit of a number changes about half of the bits (splitmix64's last steps; Steele et al. 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _kinds() -> Bytes:
    kinds = np.full(256, KEPT, dtype=np.uint8)
    for byte in range(128):
        sign = chr(byte)
        if sign.isspace() or (byte < 32 and byte != UNKNOWN[0]) or byte == 127:
            kinds[byte] = BETWEEN
        elif byte != UNKNOWN[0] and not sign.isalnum():
            kinds[byte] = DROPPED
    return kinds


def _powers(base: np.uint64, count: int) -> Hashes:
    return np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(count - 1, base)]))


KINDS = _kinds()
LETTERS = _powers(LETTER, 256)
POWERS = _powers(PLACE, CHARACTERS.length)
