"""The cost of a text section by section, so that it can be resampled: how sure is a difference of two models?

Sections are documents. One that is longer than a hundredth of the text is cut into equal pieces, and documents that are
much shorter are put together with their neighbours. All of it is counted in bytes of the text itself, so that a text
has the same sections whatever the tokenizer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.data.shards import Ids, Tokens
from weft.errors import DataError
from weft.evaluate.perplexity import TokenScores
from weft.evaluate.unspelled import spelled
from weft.text.tokenizer import Tokenizer

PIECES = 100  # that a text of one document is cut into
SHORTEST = 500  # bytes of a piece
MOST = 1000  # sections that short documents are put together to, about

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SectionScores:
    """What each section of a text costs: (sections,) each, and in all what `Score` has.

    `nats` are those of the predicted tokens, with 8 bits for each byte that no token spells.
    """

    nats: Array
    bytes: Ids
    tokens: Ids

    @property
    def bits_per_byte(self) -> float:
        """Over all sections."""
        return float(self.nats.sum() / math.log(2) / self.bytes.sum())


@dataclass(frozen=True)
class Sections:
    """How a text is cut: `firsts` (sections + 1,), the first token of each and the end; `bytes`, and what isn't paid.

    `unspelled`, `begins` and `unknown` (sections,) are bytes that no token spells, bytes of tokens that begin a
    document, and unknown words.
    """

    firsts: Ids
    bytes: Ids
    unspelled: Array
    begins: Array
    unknown: Ids

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def tokens(self) -> int:
        """How many tokens of the text these sections hold."""
        return int(self.firsts[-1])

    def scores(self, parts: Iterable[TokenScores], *, apart: bool = False) -> SectionScores:
        """Add up what each token costs; `apart` where nothing predicts the token that begins a document."""
        nats, tokens = np.zeros(len(self)), np.zeros(len(self), dtype=np.int64)
        for part in parts:
            own = np.searchsorted(self.firsts, part.places, side="right") - 1
            nats += np.bincount(own, part.nats, len(self))
            tokens += np.bincount(own, minlength=len(self))
        unpaid = self.unspelled + self.begins if apart else self.unspelled
        return SectionScores(nats + 8 * math.log(2) * unpaid, self.bytes, tokens)


def cut(text: Tokens, tokenizer: Tokenizer, *, most_bytes: int | None = None) -> Sections:
    """Cut a text, or as many sections of it as begin in its first `most_bytes`."""
    borders = _borders(text.sections, most_bytes)
    count = len(borders) - 1
    firsts = np.full(count + 1, len(text), dtype=np.int64)
    unspelled, begins, unknown = np.zeros(count + 1), np.zeros(count + 1), np.zeros(count + 1)
    for part in spelled(text, tokenizer):
        own = np.searchsorted(borders, part.places, side="right") - 1  # the last number is what isn't wanted
        numbers, first = np.unique(own, return_index=True)
        firsts[numbers] = np.minimum(firsts[numbers], part.first + first)
        unspelled += np.bincount(own, part.missing, count + 1)
        begins += np.bincount(own[part.begins], part.sizes[part.begins], count + 1)
        unknown += np.bincount(own, part.unknown, count + 1)
        places, lost = part.silent
        unspelled += np.bincount(np.searchsorted(borders, places, side="right") - 1, lost, count + 1)
        if count in numbers:
            break
    # a section without a token begins where the next one does
    firsts = np.minimum.accumulate(firsts[::-1])[::-1]
    return Sections(firsts, np.diff(borders), unspelled[:-1], begins[:-1], unknown[:-1].astype(np.int64))


def joined(scores: Sequence[SectionScores]) -> SectionScores:
    """The sections of several texts, one after another."""
    return SectionScores(*(np.concatenate([getattr(s, name) for s in scores]) for name in ("nats", "bytes", "tokens")))


def _borders(stored: Ids, most_bytes: int | None) -> Ids:
    """The bytes at which sections begin, and the end: (sections + 1,)."""
    _, sizes, numbers = stored
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    documents = np.add.reduceat(sizes, begins) if len(begins) else sizes
    whole = int(documents.sum())
    if not whole:
        raise DataError("the text to evaluate is empty")
    read = whole if most_bytes is None else min(most_bytes, whole)
    longest, shortest = max(SHORTEST, -(-read // PIECES)), read / MOST
    borders, at, waiting = [0], 0, 0
    for size in documents.tolist():
        if borders[-1] >= read:
            break
        if waiting and waiting + size > longest:
            borders.append(at)
            waiting = 0
        pieces = max(1, -(-size // longest))
        borders += [at + size * piece // pieces for piece in range(1, pieces)]
        at += size
        waiting = waiting + size if pieces == 1 else longest
        if waiting >= shortest:
            borders.append(at)
            waiting = 0
    if waiting:
        borders.append(at)
    kept = [border for border in borders if border < read]
    return np.array(borders[: len(kept) + 1], dtype=np.int64)
