"""How much of an evaluation text was trained on: word 13-grams that both texts hold (Brown et al. 2020, appendix C).

Words are lower-cased and lose their punctuation. A text whose "words" are long, such as Chinese, is compared in
50-grams of characters. N-grams lie inside of documents; a document that is shorter than one counts as a whole.

The n-grams of the evaluation text are kept as sorted 64-bit hashes, and the training text goes past them a block at a
time, so that memory is bounded by the evaluation text: 24 bytes for each n-gram, and the text. Beyond MAX_KEPT_NGRAMS
a sample of them is kept: those whose hash is a multiple of some number, which the result names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids, Tokens
from weft.errors import counted
from weft.figures.tables import Table
from weft.progress import Advance
from weft.text.tokenizer import Tokenizer

MAX_KEPT_NGRAMS = 1 << 23
HELD_OUT_BLOCK = 1 << 20  # tokens of the evaluation text that are hashed at a time
TRAINING_BLOCK = 1 << 18  # and of the training text
WORD = 5  # bytes a word has at least, about
OVERLAPPING_TOKENS = 256  # that the next block of training text begins with again, which hold an n-gram
QUICK_BYTES = 16_000_000  # that are compared in a second or two
MAX_SHOWN = 5  # passages that are shown
MAX_PASSAGE_BYTES = 200  # of one
DROPPED, BETWEEN, KEPT = 0, 1, 2  # punctuation; white space; what words are made of
UNKNOWN = b"\x01"  # in the place of unknown words, which aren't known to be the same
MAX_WORD_LENGTH = 12  # characters on average; a text with longer ones isn't written in words
LETTER, PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd, so that products lose nothing
Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]


class Unit(NamedTuple):
    """What n-grams are made of, and how many of them."""

    name: str
    length: int

    def __str__(self) -> str:
        return f"{self.length}-grams of {self.name}"


WORDS, CHARACTERS = Unit("words", 13), Unit("characters", 50)


class NGrams(NamedTuple):
    """N-grams of a text: their hashes, and the bytes at which each begins and ends. (N,) each."""

    hashes: Hashes
    firsts: Ids
    lasts: Ids


class Shared(NamedTuple):
    """A passage that occurs in the training text: where it stands, counted from 1 but bytes, and its beginning."""

    text: int
    document: int
    byte: int
    bytes: int
    words: str


@dataclass(frozen=True)
class Overlap:
    """What of an evaluation text occurs in the training text.

    `found` of the `checked` n-grams do; they cover `covered` of its `bytes`, and stand in `touched` of its `documents`.
    Where a sample was checked, one in `sampled`, `covered` is an estimate and the `longest` passages are unknown.
    """

    unit: Unit
    checked: int
    found: int
    bytes: int
    covered: int
    documents: int
    touched: int
    longest: Sequence[Shared] = ()
    sampled: int = 1

    @property
    def share(self) -> float:
        return self.found / self.checked if self.checked else 0.0

    @property
    def covered_share(self) -> float:
        return self.covered / self.bytes if self.bytes else 0.0

    @property
    def line(self) -> str:
        if not self.checked:
            return f"not known, for the text holds no {self.unit} without unknown ones"
        sample = f" in a sample of one in {self.sampled}" if self.sampled > 1 else ""
        return (
            f"{self.share:.2%} of its {self.unit} ({self.found:,} of {self.checked:,}{sample}) occur in the training "
            f"text; they cover {self.covered_share:.2%} of its bytes and stand in {self.touched:,} of "
            f"{counted(self.documents, 'document')}"
        )


def overlap(
    held: Sequence[Tokens], training: Sequence[Tokens], tokenizer: Tokenizer, progress: Advance = lambda read: None
) -> Overlap:
    """Compare an evaluation text with a training text, both as tokens; `progress` gets the bytes as they are read."""
    speller, size = _Speller(tokenizer), sum(text.bytes for text in held)
    blocks = [(number, block) for number, text in enumerate(held, 1) for block in speller.blocks(text, HELD_OUT_BLOCK)]
    progress(size)
    unit = CHARACTERS if blocks and words_are_long(blocks[0][1].text) else WORDS
    every = max(1, -(-size // (WORD * MAX_KEPT_NGRAMS)))
    found = [ngrams(block.text, block.starts, unit, every) for _, block in blocks]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(each.hashes for each in found)])
    kept, own = np.unique(hashes, return_inverse=True)
    met = np.zeros(len(kept), dtype=bool)
    # a table of the first bits of each hash: most of what isn't among them is not looked for
    shift = np.uint64(64 - min(26, max(16, len(kept).bit_length() + 3)))
    table = np.zeros(1 << (64 - int(shift)), dtype=bool)
    table[kept >> shift] = True
    for text in training if len(kept) else ():
        for block in speller.blocks(text, TRAINING_BLOCK, OVERLAPPING_TOKENS):
            trained = ngrams(block.text, block.starts, unit, every).hashes
            likely = trained[table[trained >> shift]]
            at = np.minimum(np.searchsorted(kept, likely), len(kept) - 1)
            met[at[kept[at] == likely]] = True
            progress(len(block.text))
    result = _result(blocks, found, met[own], unit, size)
    if every == 1:
        return result
    return replace(result, covered=round(size * result.share), longest=(), sampled=every)


class _Block(NamedTuple):
    """Text of some documents: where each begins in it, which documents they are, and at which byte of them."""

    text: bytes
    starts: Ids
    documents: Ids
    offsets: Ids


class _Speller:
    """Writes out many tokens at once: the vocabulary is one row of bytes, from which each token takes its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = set(tokenizer.special_tokens.values())
        words = [b"\n" if id in special else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        if tokenizer.unk_id is not None:
            words[tokenizer.unk_id] = UNKNOWN
        self.sizes = np.array([len(word) for word in words])
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.row = np.frombuffer(b"".join(words), dtype=np.uint8)

    def blocks(self, text: Tokens, block: int, again: int = 0) -> Iterator[_Block]:
        """A text `block` tokens at a time, each time with so many of those before `again`."""
        document, offset = -1, 0  # what the block before ended in
        for start in range(0, len(text), block):
            before = min(start, again)
            length = min(block, len(text) - start) + before
            ids, numbers = text.read(start - before, length), text.documents(start - before, length)
            sizes = self.sizes[ids]
            ends = np.cumsum(sizes)
            taken = np.arange(ends[-1]) + np.repeat(self.starts[ids] - ends + sizes, sizes)
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            starts, documents, offsets = (ends - sizes)[begins], numbers[begins], np.zeros_like(begins)
            if documents[0] == document:
                offsets[0] = offset - (ends[before - 1] if before else 0)
            document = int(documents[-1])
            offset = int(offsets[-1] + ends[-1] - starts[-1])
            yield _Block(self.row[taken].tobytes(), starts, documents, offsets)


def _result(
    blocks: list[tuple[int, _Block]], found: list[NGrams], met: npt.NDArray[np.bool_], unit: Unit, size: int
) -> Overlap:
    shared, documents = list[Shared](), set[tuple[int, int]]()
    parts = np.split(met, np.cumsum([len(each.hashes) for each in found])[:-1])
    for (number, block), grams, mine in zip(blocks, found, parts, strict=True):
        documents.update((number, document) for document in block.documents.tolist())
        for first, last in _runs(grams.firsts[mine], grams.lasts[mine]):
            own = int(np.searchsorted(block.starts, first, side="right")) - 1
            byte = int(block.offsets[own]) + first - int(block.starts[own])
            words = block.text[first : min(last, first + MAX_PASSAGE_BYTES)].decode(errors="ignore")
            shared.append(Shared(number, int(block.documents[own]) + 1, byte, last - first, words))
    covered, touched = sum(each.bytes for each in shared), {(each.text, each.document) for each in shared}
    longest = sorted(shared, key=lambda each: -each.bytes)[:MAX_SHOWN]
    return Overlap(unit, len(met), int(met.sum()), size, covered, len(documents), len(touched), longest)


def _runs(firsts: Ids, lasts: Ids) -> list[tuple[int, int]]:
    """The stretches that n-grams cover together, given where each begins, ascending, and ends."""
    if not len(firsts):
        return []
    reached = np.maximum.accumulate(lasts)
    new = np.flatnonzero(np.concatenate([[True], firsts[1:] > reached[:-1]]))
    return list(zip(firsts[new].tolist(), np.append(reached[new[1:] - 1], reached[-1]).tolist(), strict=True))


def overlap_tables(found: Overlap, most: int = 44) -> list[Table]:
    """The longest passages that occur in the training text, if there are any, so many characters of each."""
    rows = [(f"{each.bytes:,}", each.text, each.document, each.byte, each.words) for each in found.longest]
    title = "The longest passages that occur in the training text"
    return [passages_table(title, ("bytes", "begins"), rows, most)] if rows else []


def passages_table(
    title: str, ends: tuple[str, str], rows: Sequence[tuple[str, int, int, int, str]], most: int
) -> Table:
    """Passages with a number each, the part and the document that they stand in, their byte there and their words."""
    several, cells = any(part > 1 for _, part, *_ in rows), []
    for number, part, document, byte, words in rows:
        line = " ".join(words.split())
        line = line if len(line) <= most else line[: most - 1].rstrip() + "…"
        cells.append((number, f"{part}:{document:,}" if several else f"{document:,}", f"{byte:,}", line))
    header = (ends[0], "part:document" if several else "document", "byte", ends[1])
    return Table(header, cells, title, text=(3,))


def words_are_long(text: bytes) -> bool:
    """Whether a text isn't written in words with spaces between them."""
    raw, kind = _classified(text)
    places = np.flatnonzero(kind == KEPT)
    words, letters = _begins(kind, places).sum(), (raw[places] & 0xC0 != 0x80).sum()
    return bool(words) and letters / words > MAX_WORD_LENGTH


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
    starts = np.flatnonzero(_begins(kind, places) if unit is WORDS else letters & 0xC0 != 0x80)
    inside = np.arange(len(places)) - np.repeat(starts, np.diff(np.append(starts, len(places))))
    units = _mixed(np.add.reduceat((letters + np.uint64(1)) * LETTERS[inside & 255], starts))
    first, last = places[starts], places[np.append(starts[1:], len(places)) - 1] + 1
    unknown = np.concatenate([[0], np.cumsum(np.maximum.reduceat(letters == UNKNOWN[0], starts))])
    document = np.searchsorted(documents, first, side="right")

    n, count = unit.length, max(0, len(units) - unit.length + 1)
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
    return np.diff(np.cumsum(kind == BETWEEN)[places], prepend=-1) != 0


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


def _kind(byte: int) -> int:
    sign = chr(byte)
    if byte > 127 or byte == UNKNOWN[0] or sign.isalnum():
        return KEPT
    return BETWEEN if sign.isspace() or byte < 32 or byte == 127 else DROPPED


KINDS = np.array([_kind(byte) for byte in range(256)], dtype=np.uint8)
LETTERS = np.cumprod(np.array([1] + [LETTER] * 255, dtype=np.uint64))  # powers
POWERS = np.cumprod(np.array([1] + [PLACE] * (CHARACTERS.length - 1), dtype=np.uint64))
