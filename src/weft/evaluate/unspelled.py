"""What of a text its tokens don't give back: unknown words, and white space that a tokenizer drops.

A model pays nothing for what it isn't asked to predict. An unknown word costs one token, whatever it says; so bits per
byte would fall with the vocabulary. A coder would have to write those bytes out, and that is what they are charged:
8 bits each, which no vocabulary can get round.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids, Tokens
from weft.text.tokenizer import Tokenizer

READ = 1 << 20  # tokens counted at a time
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spelling:
    """How much of a text its tokens spell."""

    bytes: int = 0  # of the text
    spelled: int = 0  # of them by tokens
    unknown: int = 0  # tokens that are unknown words
    unspelled: int = 0  # bytes that no token spells
    characters: int = 0  # of what is spelled
    begins: int = 0  # bytes of the tokens that begin a document, as far as they are spelled

    @property
    def exact(self) -> bool:
        """Whether the tokens decode to the text itself, as far as sizes tell."""
        return not self.unknown and 1000 * abs(self.bytes - self.spelled) <= self.bytes


@dataclass(frozen=True)
class Spelled:
    """Some tokens (N,) that follow each other in a text, with the bytes of it that each stands for.

    `places` (N,) say at which byte of the whole text a token begins, `sizes` (N,) how many bytes it spells, and
    `characters` (N,) how many characters. `missing` (N,) are the bytes that aren't spelled: unknown words share what
    their stored section lacks, and where there is none, all tokens do. `begins` (N,): whether a document begins with
    it. `silent` are the places and bytes of stored sections without a token.
    """

    first: int  # the number of the first of them in the text
    places: Array
    sizes: Array
    characters: Ids
    missing: Array
    unknown: npt.NDArray[np.bool_]
    begins: npt.NDArray[np.bool_]
    silent: tuple[Ids, Ids]
    total: Spelling


def spelled(text: Tokens, tokenizer: Tokenizer, first: int = 0) -> Iterator[Spelled]:
    """The tokens of a text with the bytes that each adds to it, about READ at a time. Special tokens add none. The
    first of them are those of the stored section that holds token `first`."""
    table, (starts, sizes, documents) = _Sizes(tokenizer), text.sections
    ends = np.append(starts[1:], len(text))
    stored = np.stack([starts, ends, sizes, np.cumsum(sizes) - sizes])
    low, document = int(np.searchsorted(starts, first, side="right")) - 1 if first else 0, -1
    while low < len(starts):
        high = max(low + 1, int(np.searchsorted(ends, starts[low] + READ, side="right")))
        ids = text.read(int(starts[low]), int(ends[high - 1] - starts[low]))
        numbers = np.repeat(documents[low:high], (ends - starts)[low:high])
        begins = np.diff(numbers, prepend=document) != 0
        document = int(numbers[-1]) if len(numbers) else document
        yield _spelled(table, ids, begins, stored[:, low:high])
        low = high


def spelling(text: Tokens, tokenizer: Tokenizer) -> Spelling:
    """Count the bytes that the tokens of a text add to it. What one stored section lacks, no other makes up for."""
    totals = (astuple(part.total) for part in spelled(text, tokenizer))
    return Spelling(*map(sum, zip(*totals, strict=True)))


class _Sizes:
    """The bytes and characters of each token, found when it is met first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.unk_id = tokenizer, tokenizer.unk_id
        self.bytes = np.full(tokenizer.vocab_size, -1, dtype=np.int64)
        self.characters = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.bytes[list(tokenizer.special_tokens.values())] = 0

    def meet(self, ids: Ids) -> None:
        for id in np.unique(ids[self.bytes[ids] < 0]).tolist():
            added = self.tokenizer.token_bytes(id)
            self.bytes[id] = len(added)
            self.characters[id] = sum(byte & 0xC0 != 0x80 for byte in added)  # a character has one such byte


def _spelled(table: _Sizes, ids: Ids, begins: npt.NDArray[np.bool_], stored: Ids) -> Spelled:
    """Sections as they are stored (4, sections): first tokens, those after the last, bytes, and where they begin."""
    starts, ends, bytes_, offsets = stored
    table.meet(ids)
    count, lengths = len(starts), ends - starts
    own = np.repeat(np.arange(count), lengths)  # the section of each token
    plain = table.bytes[ids].astype(np.float64)
    unknown = np.zeros(len(ids), dtype=bool) if table.unk_id is None else ids == table.unk_id
    spell = np.bincount(own, plain, count).astype(np.int64)
    unknowns = np.bincount(own, unknown, count).astype(np.int64)
    unspelled = np.maximum(bytes_ - spell, unknowns)
    shares = unspelled / np.maximum(np.where(unknowns > 0, unknowns, lengths), 1)
    missing = np.where(unknown | (unknowns == 0)[own], shares[own], 0.0)
    # where tokens spell more than the text has (a space before its first word), they share what there is
    whole = np.bincount(own, plain + missing, count)
    taken = (plain + missing) * np.divide(bytes_, whole, out=np.ones(count), where=whole > 0)[own]
    before = np.append(np.cumsum(taken) - taken, 0.0)
    inside = before[:-1] - before[starts - starts[0]][own]
    # the token that ends a document has no bytes, and belongs to it
    places = offsets[own] + np.minimum(inside, np.maximum(bytes_ - 0.5, 0)[own])
    silent, characters = lengths == 0, table.characters[ids]
    sums = (bytes_, spell, unknowns, unspelled, characters, plain[begins])
    nothing, total = (offsets[silent], unspelled[silent]), Spelling(*(int(each.sum()) for each in sums))
    return Spelled(int(starts[0]), places, plain, characters, missing, unknown, begins, nothing, total)
