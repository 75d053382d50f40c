"""The cost of a text section by section, so that it can be resampled: how sure is a difference of two models?

Sections are documents. One that is longer than a hundredth of the text is cut into equal pieces, and documents that are
much shorter are put together with their neighbours. All of it is counted in bytes of the text itself, so that a text
has the same sections whatever the tokenizer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from weft.data.shards import Ids, Tokens
from weft.errors import DataError
from weft.evaluate.bootstrap import Array, Interval, ratio_interval, weights
from weft.evaluate.perplexity import BYTE, Score, TokenScores, perplexity
from weft.evaluate.unspelled import spelled
from weft.text.tokenizer import Tokenizer

PIECES = 100  # that a text of one document is cut into
MIN_PIECE_BYTES = 500
MAX_SECTIONS = 1000  # sections that short documents are put together to, about


@dataclass(frozen=True)
class SectionScores:
    """What each section of a text costs: (sections,) each, and in all what `Score` has.

    `nats` are those of the predicted tokens, with 8 bits for each of the `unpaid` bytes, which no token spells, or
    which nothing predicts. `characters` are counted in what is spelled, and taken as frequent in the rest.
    """

    nats: Array
    bytes: Ids
    tokens: Ids
    unpaid: Array
    unknown: Ids
    characters: Array

    @property
    def token_nats(self) -> Array:
        """Those of the predicted tokens alone."""
        return self.nats - BYTE * self.unpaid

    @property
    def bits_per_byte(self) -> float:
        """Over all sections."""
        return float(self.nats.sum() / math.log(2) / self.bytes.sum())

    @property
    def score(self) -> Score:
        nats, unpaid = float(self.token_nats.sum()), float(self.unpaid.sum())
        return Score(nats, int(self.tokens.sum()), int(self.bytes.sum()), int(self.unknown.sum()), unpaid)

    def intervals(self) -> dict[str, Interval]:
        """The metrics' 95 % intervals, by a bootstrap over sections; none of one section, or of an infinite cost."""
        if len(self.nats) < 2 or not np.isfinite(self.nats).all():
            return {}
        drawn = weights(len(self.nats))
        loss = ratio_interval(self.token_nats, self.tokens, drawn)
        bits = self.nats / math.log(2)
        return {
            "loss": loss,
            "perplexity": Interval(*map(perplexity, loss)),
            "bits_per_byte": ratio_interval(bits, self.bytes, drawn),
            "bits_per_character": ratio_interval(bits, self.characters, drawn),
        }


@dataclass(frozen=True)
class Sections:
    """How a text is cut: `firsts` (sections + 1,), the first token of each and the end; and what each holds.

    (sections,) each: `bytes`; `unspelled`, bytes that no token spells; `begins`, bytes of tokens that begin a document;
    `unknown` words; `characters`. `first` are the bytes of the text's first token.
    """

    firsts: Ids
    bytes: Ids
    unspelled: Array
    begins: Array
    unknown: Ids
    characters: Array
    first: float

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def tokens(self) -> int:
        """How many tokens of the text these sections hold."""
        return int(self.firsts[-1])

    def scores(self, parts: Iterable[TokenScores], *, apart: bool = False, abrupt: bool = False) -> SectionScores:
        """Add up tokens' costs; nothing predicts a document's first one if `apart`, the very first if `abrupt`."""
        nats, tokens = np.zeros(len(self)), np.zeros(len(self), dtype=np.int64)
        for part in parts:
            own = np.searchsorted(self.firsts, part.places, side="right") - 1
            nats += np.bincount(own, part.nats, len(self))
            tokens += np.bincount(own, minlength=len(self))
        unpaid = self.unspelled + self.begins if apart else self.unspelled.copy()
        unpaid[0] += self.first if abrupt else 0.0
        return SectionScores(nats + BYTE * unpaid, self.bytes, tokens, unpaid, self.unknown, self.characters)


def cut(text: Tokens, tokenizer: Tokenizer, *, most_bytes: int | None = None) -> Sections:
    """Cut a text, or as many sections of it as begin in its first `most_bytes`."""
    borders = _borders(text.sections, most_bytes)
    count, opening = len(borders) - 1, 0.0
    firsts = np.full(count + 1, len(text), dtype=np.int64)
    held = np.zeros((5, count + 1))  # the last column is what isn't wanted
    for part in spelled(text, tokenizer):
        own = np.searchsorted(borders, part.places, side="right") - 1
        numbers, first = np.unique(own, return_index=True)
        firsts[numbers] = np.minimum(firsts[numbers], part.first + first)
        begins = np.where(part.begins, part.sizes, 0.0)
        opening = float(part.sizes[0]) if part.first == 0 and len(part.sizes) else opening
        for row, each in zip(held, (part.missing, begins, part.unknown, part.characters, part.sizes), strict=True):
            row += np.bincount(own, each, count + 1)
        places, lost = part.silent
        held[0] += np.bincount(np.searchsorted(borders, places, side="right") - 1, lost, count + 1)
        if count in numbers:
            break
    # a section without a token begins where the next one does
    firsts = np.minimum.accumulate(firsts[::-1])[::-1]
    sizes, (unspelled, begins, unknown, characters, spelt) = np.diff(borders), held[:, :-1]
    characters = characters * (sizes.sum() / spelt.sum()) if spelt.any() else sizes.astype(np.float64)
    return Sections(firsts, sizes, unspelled, begins, unknown.astype(np.int64), characters, opening)


def joined(scores: Sequence[SectionScores]) -> SectionScores:
    """The sections of several texts, one after another."""
    names = [field.name for field in fields(SectionScores)]
    return SectionScores(*(np.concatenate([getattr(each, name) for each in scores]) for name in names))


def section_metrics(found: SectionScores) -> dict[str, Any]:
    """The metrics of a text by name, their intervals, and how much text that is."""
    whole = found.score
    return {
        **whole.metrics(),
        "bits_per_character": found.bits_per_byte * float(found.bytes.sum() / found.characters.sum()),
        "unknown_share": whole.unknown_share,
        "tokens": whole.tokens,
        "bytes": whole.bytes,
        "characters": round(float(found.characters.sum())),
        "sections": len(found.nats),
        "intervals": {name: list(interval) for name, interval in found.intervals().items()},
    }


def _borders(stored: Ids, most_bytes: int | None) -> Ids:
    _, sizes, numbers = stored
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    documents = np.add.reduceat(sizes, begins) if len(begins) else sizes
    whole = int(documents.sum())
    if not whole:
        raise DataError("the text to evaluate is empty")
    read = whole if most_bytes is None else min(most_bytes, whole)
    longest, shortest = max(MIN_PIECE_BYTES, -(-read // PIECES)), read / MAX_SECTIONS
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
    return np.array(borders[: sum(border < read for border in borders) + 1], dtype=np.int64)
