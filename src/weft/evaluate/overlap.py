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
from weft.evaluate.ngrams import CHARACTERS, UNKNOWN, WORDS, NGrams, Unit, ngrams, words_are_long
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
Hashes = npt.NDArray[np.uint64]


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
        """Of the n-grams; 0 where there are none."""
        return self.found / self.checked if self.checked else 0.0

    @property
    def covered_share(self) -> float:
        """Of the bytes."""
        return self.covered / self.bytes if self.bytes else 0.0

    @property
    def line(self) -> str:
        """The result in a sentence."""
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
    speller = _Speller(tokenizer)
    blocks = [(number, block) for number, text in enumerate(held, 1) for block in speller.blocks(text, HELD_OUT_BLOCK)]
    progress(sum(text.bytes for text in held))
    unit = CHARACTERS if blocks and words_are_long(blocks[0][1].text) else WORDS
    every = max(1, -(-sum(text.bytes for text in held) // (WORD * MAX_KEPT_NGRAMS)))
    found = [ngrams(block.text, block.starts, unit, every) for _, block in blocks]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(each.hashes for each in found)])
    kept, own = np.unique(hashes, return_inverse=True)
    met = np.zeros(len(kept), dtype=bool)
    sieve = _Sieve(kept)
    for text in training if len(kept) else ():
        for block in speller.blocks(text, TRAINING_BLOCK, OVERLAPPING_TOKENS):
            met[sieve.places(ngrams(block.text, block.starts, unit, every).hashes)] = True
            progress(len(block.text))
    result = _result(blocks, found, met[own], unit, sum(text.bytes for text in held))
    if every == 1:
        return result
    return replace(result, covered=round(result.bytes * result.share), longest=(), sampled=every)


class _Sieve:
    """Sorted hashes, and a table of the first bits of each: most of what isn't among them is not looked for."""

    def __init__(self, kept: Hashes) -> None:
        self.kept = kept
        self.shift = np.uint64(64 - min(26, max(16, len(kept).bit_length() + 3)))
        self.table = np.zeros(1 << (64 - int(self.shift)), dtype=bool)
        self.table[kept >> self.shift] = True

    def places(self, hashes: Hashes) -> Ids:
        """The numbers of those that are among the kept ones."""
        likely = hashes[self.table[hashes >> self.shift]]
        at = np.minimum(np.searchsorted(self.kept, likely), len(self.kept) - 1)
        return at[self.kept[at] == likely]


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
    """Put together which n-grams were met, block by block."""
    shared: list[Shared] = []
    documents: set[tuple[int, int]] = set()
    parts = np.split(met, np.cumsum([len(each.hashes) for each in found])[:-1])
    for (number, block), grams, mine in zip(blocks, found, parts, strict=True):
        documents.update((number, document) for document in block.documents.tolist())
        for first, last in _runs(grams.firsts[mine], grams.lasts[mine]):
            own = int(np.searchsorted(block.starts, first, side="right")) - 1
            byte = int(block.offsets[own]) + first - int(block.starts[own])
            words = block.text[first : min(last, first + MAX_PASSAGE_BYTES)].decode(errors="ignore")
            shared.append(Shared(number, int(block.documents[own]) + 1, byte, last - first, words))
    return Overlap(
        unit,
        checked=len(met),
        found=int(met.sum()),
        bytes=size,
        covered=sum(each.bytes for each in shared),
        documents=len(documents),
        touched=len({(each.text, each.document) for each in shared}),
        longest=sorted(shared, key=lambda each: -each.bytes)[:MAX_SHOWN],
    )


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
    several = any(part > 1 for _, part, *_ in rows)
    cells = [
        (number, f"{part}:{document:,}" if several else f"{document:,}", f"{byte:,}", shortened(words, most))
        for number, part, document, byte, words in rows
    ]
    header = (ends[0], "part:document" if several else "document", "byte", ends[1])
    return Table(header, cells, title, text=(3,))


def shortened(text: str, most: int) -> str:
    """A text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
