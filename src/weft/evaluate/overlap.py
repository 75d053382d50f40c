"""Overlap of an evaluation text with the training text: common word 13-grams (Brown et al. 2020, appendix C).

Words are lower-cased and stripped of punctuation. A text with very long "words", such as Chinese, is compared by
50-grams of characters. N-grams don't cross documents; a document shorter than an n-gram counts as one.

The n-grams of the evaluation text are kept as sorted 64-bit hashes, and the training text is compared block by block.
Memory is bounded by the evaluation text: 24 bytes per n-gram, and the text itself. Beyond MAX_NGRAMS, a sample is kept:
the hashes that are a multiple of a number, which the result reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids, Tokens
from weft.errors import counted
from weft.figures.tables import Table
from weft.progress import Advance
from weft.text.tokenizer import Tokenizer

MAX_NGRAMS = 1 << 23  # of the evaluation text that are kept; beyond, a sample
HELD_OUT_BLOCK = 1 << 20  # tokens of the evaluation text that are hashed at a time
TRAINING_BLOCK = 1 << 18  # tokens of the training text that are hashed at a time
MIN_WORD_BYTES = 5  # approximate size of a word, to estimate the number of n-grams
OVERLAPPING_TOKENS = 256  # that consecutive training blocks share, so that no n-gram is lost between them
QUICK_BYTES = 16_000_000  # compared in a second or two
MAX_PASSAGES = 5  # shown in a table
MAX_PASSAGE_BYTES = 200  # shown of each
DROPPED, BETWEEN, KEPT = 0, 1, 2  # kinds of bytes: punctuation, whitespace, parts of words
UNKNOWN = b"\x01"  # replaces unknown words, which never count as equal
MAX_WORD_LENGTH = 12  # mean characters of a word; a text with longer ones has no words
LETTER, POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd, so products are invertible
Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]


class Unit(NamedTuple):
    """The unit of n-grams, and their length."""

    name: str
    length: int

    def __str__(self) -> str:
        return f"{self.length}-grams of {self.name}"


WORDS, CHARACTERS = Unit("words", 13), Unit("characters", 50)


class NGrams(NamedTuple):
    """N-grams of a text: hashes, and half-open byte ranges. (N,) each."""

    hashes: Hashes
    firsts: Ids
    lasts: Ids


class SharedPassage(NamedTuple):
    """A passage that occurs in the training text: text and document, counted from 1, byte offset, size, beginning."""

    text: int
    document: int
    byte: int
    bytes: int
    words: str


@dataclass(frozen=True)
class Overlap:
    """Overlap of an evaluation text with the training text."""

    unit: Unit
    checked: int  # n-grams
    found: int  # of them in the training text
    bytes: int
    covered: int  # bytes in those; an estimate if `sampled`
    documents: int
    touched: int  # documents with one
    longest: Sequence[SharedPassage] = ()  # unknown if `sampled`
    sampled: int = 1  # one n-gram in this many was checked

    @property
    def share(self) -> float:
        return self.found / self.checked if self.checked else 0.0

    @property
    def line(self) -> str:
        if not self.checked:
            return f"unknown: the text holds no {self.unit} without unknown ones"
        sample = f" in a sample of one in {self.sampled}" if self.sampled > 1 else ""
        return (
            f"{self.share:.2%} of its {self.unit} ({self.found:,} of {self.checked:,}{sample}) occur in the training "
            f"text; they cover {self.covered / max(1, self.bytes):.2%} of its bytes and are in {self.touched:,} of "
            f"{counted(self.documents, 'document')}"
        )


def overlap(
    held_out: Sequence[Tokens],
    training: Sequence[Tokens],
    tokenizer: Tokenizer,
    *,
    progress: Advance = lambda read: None,
    training_block: int = TRAINING_BLOCK,
    max_ngrams: int = MAX_NGRAMS,
) -> Overlap:
    """Compare an evaluation text with a training text, both as tokens; `progress` receives the bytes read."""
    speller, size = _Speller(tokenizer), sum(text.bytes for text in held_out)
    texts = enumerate(held_out, start=1)
    blocks = [(number, block) for number, text in texts for block in speller.blocks(text, HELD_OUT_BLOCK)]
    progress(size)
    unit = CHARACTERS if blocks and words_are_long(blocks[0][1].text) else WORDS
    sample = max(1, -(-size // (MIN_WORD_BYTES * max_ngrams)))
    grams = [ngrams(block.text, block.starts, unit, sample=sample) for _, block in blocks]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(each.hashes for each in grams)])
    distinct, inverse = np.unique(hashes, return_inverse=True)
    found = np.zeros(len(distinct), dtype=bool)
    # a table of the first bits of each hash spares most of the binary searches
    shift = np.uint64(64 - min(26, max(16, len(distinct).bit_length() + 3)))
    table = np.zeros(1 << (64 - int(shift)), dtype=bool)
    table[distinct >> shift] = True
    for text in training if len(distinct) else ():
        for block in speller.blocks(text, training_block, OVERLAPPING_TOKENS):
            trained = ngrams(block.text, block.starts, unit, sample=sample).hashes
            likely = trained[table[trained >> shift]]
            at = np.minimum(np.searchsorted(distinct, likely), len(distinct) - 1)
            found[at[distinct[at] == likely]] = True
            progress(len(block.text))
    matches = found[inverse]
    shared, exact = _shared_passages(blocks, grams, matches), sample == 1
    share = int(matches.sum()) / max(1, len(matches))
    return Overlap(
        unit=unit,
        checked=len(matches),
        found=int(matches.sum()),
        bytes=size,
        covered=sum(each.bytes for each in shared) if exact else round(size * share),
        documents=len({(number, document) for number, block in blocks for document in block.documents.tolist()}),
        touched=len({(each.text, each.document) for each in shared}),
        longest=sorted(shared, key=lambda each: -each.bytes)[:MAX_PASSAGES] if exact else (),
        sampled=sample,
    )


class _TextBlock(NamedTuple):
    """Text of consecutive documents: where each begins in it, their numbers, and the byte offsets in them."""

    text: bytes
    starts: Ids
    documents: Ids
    offsets: Ids


class _Speller:
    """Decodes many tokens in one call: the vocabulary is one array of bytes that tokens are gathered from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = set(tokenizer.special_tokens.values())
        words = [b"\n" if id in special else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        if tokenizer.unk_id is not None:
            words[tokenizer.unk_id] = UNKNOWN
        self.sizes = np.array([len(word) for word in words])
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.row = np.frombuffer(b"".join(words), dtype=np.uint8)

    def blocks(self, text: Tokens, size: int, overlapping: int = 0) -> Iterator[_TextBlock]:
        """Yield a text in blocks of `size` tokens, each preceded by `overlapping` tokens of the one before."""
        document, offset = -1, 0  # at the end of the previous block
        for start in range(0, len(text), size):
            before = min(start, overlapping)
            length = min(size, len(text) - start) + before
            ids, numbers = text.read(start - before, length), text.documents(start - before, length)
            sizes = self.sizes[ids]
            ends = np.cumsum(sizes)
            index = np.arange(ends[-1]) + np.repeat(self.starts[ids] - ends + sizes, sizes)
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            starts, documents, offsets = (ends - sizes)[begins], numbers[begins], np.zeros_like(begins)
            if documents[0] == document:
                offsets[0] = offset - (ends[before - 1] if before else 0)
            document = int(documents[-1])
            offset = int(offsets[-1] + ends[-1] - starts[-1])
            yield _TextBlock(self.row[index].tobytes(), starts, documents, offsets)


def _shared_passages(
    blocks: list[tuple[int, _TextBlock]], grams: list[NGrams], matches: npt.NDArray[np.bool_]
) -> list[SharedPassage]:
    shared = []
    parts = np.split(matches, np.cumsum([len(each.hashes) for each in grams])[:-1])
    for (number, block), each, found in zip(blocks, grams, parts, strict=True):
        for first, last in _union(each.firsts[found], each.lasts[found]):
            index = int(np.searchsorted(block.starts, first, side="right")) - 1
            byte = int(block.offsets[index]) + first - int(block.starts[index])
            words = block.text[first : min(last, first + MAX_PASSAGE_BYTES)].decode(errors="ignore")
            at = (number, int(block.documents[index]) + 1, byte)
            shared.append(SharedPassage(*at, bytes=last - first, words=words))
    return shared


def _union(firsts: Ids, lasts: Ids) -> list[tuple[int, int]]:
    """Merge half-open ranges [first, last), ascending by first."""
    if not len(firsts):
        return []
    reached = np.maximum.accumulate(lasts)
    new = np.flatnonzero(np.concatenate([[True], firsts[1:] > reached[:-1]]))
    return list(zip(firsts[new].tolist(), np.append(reached[new[1:] - 1], reached[-1]).tolist(), strict=True))


def overlap_tables(found: Overlap, max_characters: int = 44) -> list[Table]:
    """Table of the longest passages that occur in the training text, if any."""
    rows = [(f"{each.bytes:,}", each.text, each.document, each.byte, each.words) for each in found.longest]
    title = "The longest passages that occur in the training text"
    return [passages_table(title, ("bytes", "begins"), rows, max_characters=max_characters)] if rows else []


def passages_table(
    title: str, header: tuple[str, str], rows: Sequence[tuple[str, int, int, int, str]], *, max_characters: int
) -> Table:
    """Table of passages: a value, the part and document, the byte offset in it, and the words."""
    several, cells = any(part > 1 for _, part, *_ in rows), []
    for value, part, document, byte, words in rows:
        line = " ".join(words.split())
        line = line if len(line) <= max_characters else line[: max_characters - 1].rstrip() + "…"
        cells.append((value, f"{part}:{document:,}" if several else f"{document:,}", f"{byte:,}", line))
    return Table((header[0], "part:document" if several else "document", "byte", header[1]), cells, title, text=(3,))


def words_are_long(text: bytes) -> bool:
    """Return whether a text has no words separated by spaces."""
    raw, kind = _classify(text)
    kept = np.flatnonzero(kind == KEPT)
    words, letters = _begins_word(kind, kept).sum(), (raw[kept] & 0xC0 != 0x80).sum()
    return bool(words) and letters / words > MAX_WORD_LENGTH


def ngrams(text: bytes, documents: Ids, unit: Unit, *, sample: int = 1) -> NGrams:
    """Return the n-grams of a UTF-8 text whose documents begin at these bytes; one hash in `sample` is kept.

    N-grams don't cross documents, which whitespace separates, nor hold unknown words; a shorter document is one n-gram.
    """
    raw, kind = _classify(text)
    kept = np.flatnonzero(kind == KEPT)
    if not len(kept):
        return NGrams(np.zeros(0, np.uint64), *np.zeros((2, 0), np.int64))
    letters = raw[kept]
    starts = np.flatnonzero(_begins_word(kind, kept) if unit is WORDS else letters & 0xC0 != 0x80)
    inside = np.arange(len(kept)) - np.repeat(starts, np.diff(np.append(starts, len(kept))))
    units = _mix(np.add.reduceat((letters + np.uint64(1)) * LETTER_POWERS[inside & 255], starts))
    first, last = kept[starts], kept[np.append(starts[1:], len(kept)) - 1] + 1
    unknown = np.concatenate([[0], np.cumsum(np.maximum.reduceat(letters == UNKNOWN[0], starts))])
    document = np.searchsorted(documents, first, side="right")

    n, count = unit.length, max(0, len(units) - unit.length + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for position in range(n):  # Horner's rule, vectorised over n-grams
        hashes = hashes * POSITION + units[position : position + count]
    valid = (document[n - 1 :] == document[:count]) & (unknown[n:] == unknown[:count]) if count else np.zeros(0, bool)
    short = _short_documents(units, document, unknown, n=n)
    result = NGrams(
        np.concatenate([_mix(hashes[valid]), short.hashes]),
        np.concatenate([first[:count][valid], first[short.firsts]]),
        np.concatenate([last[n - 1 :][valid] if count else last[:0], last[short.lasts]]),
    )
    chosen = np.ones(len(result.hashes), dtype=bool) if sample == 1 else result.hashes % np.uint64(sample) == 0
    order = np.argsort(result.firsts[chosen], kind="stable")
    return NGrams(*(each[chosen][order] for each in result))


def _short_documents(units: Hashes, document: Ids, unknown: Ids, *, n: int) -> NGrams:
    """Documents of fewer than n units: their hashes, and the indices of their first and last unit."""
    begins = np.flatnonzero(np.diff(document, prepend=-1))
    ends = np.append(begins[1:], len(document))
    sizes = ends - begins
    valid = (sizes < n) & (unknown[ends] == unknown[begins])
    inside = np.arange(len(units)) - np.repeat(begins, sizes)
    sums = np.add.reduceat(units * POSITION_POWERS[np.minimum(inside, len(POSITION_POWERS) - 1)], begins)
    return NGrams(_mix(sums[valid] + sizes[valid].astype(np.uint64) * LETTER), begins[valid], ends[valid] - 1)


def _begins_word(kind: Bytes, kept: Ids) -> npt.NDArray[np.bool_]:
    """Whether each kept byte begins a word: whitespace precedes it."""
    return np.diff(np.cumsum(kind == BETWEEN)[kept], prepend=-1) != 0


def _classify(text: bytes) -> tuple[Bytes, Bytes]:
    """Bytes of a text in lower case, of unchanged length, and the kind of each."""
    raw = np.frombuffer(_lower(text), dtype=np.uint8)
    kind = KINDS[raw]
    if not text.isascii() and len(raw) > 2:
        one, two, three = raw[:-2], raw[1:-1], raw[2:]
        general = (one == 0xE2) & ((two == 0x80) | (two == 0x81))  # U+2000 … U+207F
        quotes = general & (two == 0x80) & (three >= 0x98) & (three <= 0x9F)
        wide = ((one == 0xE3) & (two == 0x80)) | ((one == 0xEF) & (two == 0xBC) & (three <= 0x8F))  # 、。「」，！
        for mask, value in ((general, BETWEEN), (quotes | wide, DROPPED)):
            at = np.flatnonzero(mask)
            kind[at] = kind[at + 1] = kind[at + 2] = value
    return raw, kind


def _lower(text: bytes) -> bytes:
    """Convert to lower case, except letters whose lower case has another size, so that offsets stay valid."""
    if text.isascii():
        return text.lower()
    words = text.decode("utf-8", "replace")
    lower = words.lower().encode()
    if len(lower) == len(text):
        return lower
    pairs = ((letter, letter.lower()) for letter in set(words))
    same_size = {ord(letter): small for letter, small in pairs if len(letter.encode()) == len(small.encode())}
    return words.translate(same_size).encode()


def _mix(hashes: Hashes) -> Hashes:
    """Mix bits so that each input bit changes half of the output bits (splitmix64's finaliser; Steele et al. 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _kind(byte: int) -> int:
    sign = chr(byte)
    if byte > 127 or byte == UNKNOWN[0] or sign.isalnum():
        return KEPT
    return BETWEEN if sign.isspace() or byte < 32 or byte == 127 else DROPPED


KINDS = np.array([_kind(byte) for byte in range(256)], dtype=np.uint8)
LETTER_POWERS = np.cumprod(np.array([1] + [LETTER] * 255, dtype=np.uint64))
POSITION_POWERS = np.cumprod(np.array([1] + [POSITION] * (CHARACTERS.length - 1), dtype=np.uint64))
