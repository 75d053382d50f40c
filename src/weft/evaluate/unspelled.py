"""Bytes of a text that its tokens don't spell: unknown words, and whitespace that a tokenizer drops.

A model isn't charged for bytes that it doesn't predict: an unknown word costs one token, so bits per byte would improve
with a smaller vocabulary. A compressor would write these bytes literally, so they are charged at 8 bits each.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids, Tokens
from weft.text.tokenizer import Tokenizer

BLOCK = 1 << 20  # tokens counted at a time
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spelling:
    """Totals of the bytes that the tokens of a text spell."""

    bytes: int = 0  # of the text
    spelled: int = 0  # by tokens
    unknown: int = 0  # tokens that are unknown words
    unspelled: int = 0  # bytes that no token spells
    characters: int = 0  # that tokens spell
    begins: int = 0  # bytes spelled by the first tokens of documents

    @property
    def exact(self) -> bool:
        """Whether the tokens decode to the text itself, judged by sizes."""
        return not self.unknown and 1000 * abs(self.bytes - self.spelled) <= self.bytes


@dataclass(frozen=True)
class SpelledTokens:
    """Consecutive tokens (N,) of a text, with the bytes of the text that each stands for."""

    first: int  # position of the first token in the text
    offsets: Array  # (N,) byte offset of each token in the whole text
    sizes: Array  # (N,) bytes that each token spells
    characters: Ids  # (N,) characters that each token spells
    # (N,) unspelled bytes: unknown words share those of their stored section; without unknown words, all tokens do
    missing: Array
    unknown: npt.NDArray[np.bool_]  # (N,)
    begins: npt.NDArray[np.bool_]  # (N,) whether a document begins with the token
    empty: tuple[Ids, Ids]  # offsets and bytes of stored sections without tokens
    total: Spelling


def spell_tokens(text: Tokens, tokenizer: Tokenizer, first: int = 0) -> Iterator[SpelledTokens]:
    """Yield the tokens of a text, about BLOCK at a time, from the stored section that holds token `first`."""
    table, (starts, sizes, documents) = _TokenSizes(tokenizer), text.sections
    ends = np.append(starts[1:], len(text))
    stored = np.stack([starts, ends, sizes, np.cumsum(sizes) - sizes])
    low, document = int(np.searchsorted(starts, first, side="right")) - 1 if first else 0, -1
    while low < len(starts):
        high = max(low + 1, int(np.searchsorted(ends, starts[low] + BLOCK, side="right")))
        ids = text.read(int(starts[low]), int(ends[high - 1] - starts[low]))
        numbers = np.repeat(documents[low:high], (ends - starts)[low:high])
        begins = np.diff(numbers, prepend=document) != 0
        document = int(numbers[-1]) if len(numbers) else document
        yield _spell_sections(table, ids, begins, stored=stored[:, low:high])
        low = high


def spelling(text: Tokens, tokenizer: Tokenizer) -> Spelling:
    """Count the bytes that the tokens of a text spell; a surplus in one section doesn't offset a lack in another."""
    return Spelling(*map(sum, zip(*(astuple(part.total) for part in spell_tokens(text, tokenizer)), strict=True)))


class _TokenSizes:
    """Bytes and characters of each token, computed on first use; special tokens spell nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.unk_id = tokenizer, tokenizer.unk_id
        self.bytes = np.full(tokenizer.vocab_size, -1, dtype=np.int64)
        self.characters = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.bytes[list(tokenizer.special_tokens.values())] = 0

    def add(self, ids: Ids) -> None:
        for id in np.unique(ids[self.bytes[ids] < 0]).tolist():
            token = self.tokenizer.token_bytes(id)
            self.bytes[id] = len(token)
            self.characters[id] = sum(byte & 0xC0 != 0x80 for byte in token)  # bytes that begin a UTF-8 character


def _spell_sections(table: _TokenSizes, ids: Ids, begins: npt.NDArray[np.bool_], *, stored: Ids) -> SpelledTokens:
    """Spell the tokens of stored sections (4, sections): first tokens, ends, bytes, and byte offsets."""
    starts, ends, bytes_, offsets = stored
    table.add(ids)
    count, lengths = len(starts), ends - starts
    section = np.repeat(np.arange(count), lengths)  # of each token
    sizes = table.bytes[ids].astype(np.float64)
    unknown = np.zeros(len(ids), dtype=bool) if table.unk_id is None else ids == table.unk_id
    spelled = np.bincount(section, sizes, count).astype(np.int64)
    unknowns = np.bincount(section, unknown, count).astype(np.int64)
    unspelled = np.maximum(bytes_ - spelled, unknowns)
    shares = unspelled / np.maximum(np.where(unknowns > 0, unknowns, lengths), 1)
    missing = np.where(unknown | (unknowns == 0)[section], shares[section], 0.0)
    # where tokens spell more than the text has (a space before its first word), they share the bytes
    total = np.bincount(section, sizes + missing, count)
    scaled = (sizes + missing) * np.divide(bytes_, total, out=np.ones(count), where=total > 0)[section]
    before = np.append(np.cumsum(scaled) - scaled, 0.0)
    inside = before[:-1] - before[starts - starts[0]][section]
    empty, characters = lengths == 0, table.characters[ids]
    sums = (bytes_, spelled, unknowns, unspelled, characters, sizes[begins])
    return SpelledTokens(
        first=int(starts[0]),
        # the token that ends a document has no bytes and stays inside it
        offsets=offsets[section] + np.minimum(inside, np.maximum(bytes_ - 0.5, 0)[section]),
        sizes=sizes,
        characters=characters,
        missing=missing,
        unknown=unknown,
        begins=begins,
        empty=(offsets[empty], unspelled[empty]),
        total=Spelling(*(int(each.sum()) for each in sums)),
    )
