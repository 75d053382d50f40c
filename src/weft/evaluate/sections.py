"""Loss of a text section by section, for resampling: how certain is a difference between two models?

Sections are documents. A document longer than a hundredth of the text is cut into equal pieces, and very short ones are
merged with their neighbours. All is measured in bytes, so that a text has the same sections with every tokenizer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from weft.data.shards import Ids, Tokens
from weft.errors import DataError
from weft.evaluate.bootstrap import Array, Interval, ratio_interval, weights
from weft.evaluate.perplexity import NATS_PER_BYTE, Score, TokenScores, perplexity
from weft.evaluate.unspelled import spell_tokens
from weft.text.tokenizer import Tokenizer

MAX_PIECES = 100  # of a text that is one document
MIN_PIECE_BYTES = 500
MAX_SECTIONS = 1000  # approximately, after short documents are merged


@dataclass(frozen=True)
class SectionScores:
    """Loss of each section of a text: (sections,) each, which sum up to a `Score`."""

    nats: Array  # of the predicted tokens, plus 8 bits for each unpredicted byte
    bytes: Ids
    tokens: Ids
    unpredicted: Array  # bytes that no token spells, or of tokens that nothing predicts
    unknown: Ids  # unknown words
    characters: Array  # counted in spelled bytes, extrapolated to the others

    @property
    def token_nats(self) -> Array:
        """Loss of the predicted tokens alone."""
        return self.nats - NATS_PER_BYTE * self.unpredicted

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / math.log(2) / self.bytes.sum())

    @property
    def score(self) -> Score:
        return Score(
            nats=float(self.token_nats.sum()),
            tokens=int(self.tokens.sum()),
            bytes=int(self.bytes.sum()),
            unknown=int(self.unknown.sum()),
            unspelled=float(self.unpredicted.sum()),
        )

    def intervals(self) -> dict[str, Interval]:
        """Return the metrics' 95 % intervals by a bootstrap over sections; none for one section or an infinite loss."""
        if len(self.nats) < 2 or not np.isfinite(self.nats).all():
            return {}
        counts = weights(len(self.nats))
        loss = ratio_interval(self.token_nats, self.tokens, counts)
        bits = self.nats / math.log(2)
        return {
            "loss": loss,
            "perplexity": Interval(*map(perplexity, loss)),
            "bits_per_byte": ratio_interval(bits, self.bytes, counts),
            "bits_per_character": ratio_interval(bits, self.characters, counts),
        }


@dataclass(frozen=True)
class Sections:
    """Sections of a text: the borders in tokens, and the contents of each, (sections,)."""

    borders: Ids  # (sections + 1,) first token of each, and the end
    bytes: Ids
    unspelled: Array  # bytes that no token spells
    begins: Array  # bytes of tokens that begin a document
    unknown: Ids  # unknown words
    characters: Array
    first_bytes: float  # of the text's first token

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def tokens(self) -> int:
        """Number of tokens in all sections."""
        return int(self.borders[-1])

    def scores(
        self, parts: Iterable[TokenScores], *, isolated_documents: bool = False, no_first: bool = False
    ) -> SectionScores:
        """Add up token scores; nothing predicts the first token of isolated documents, or of the text if `no_first`."""
        nats, tokens = np.zeros(len(self)), np.zeros(len(self), dtype=np.int64)
        for part in parts:
            section = np.searchsorted(self.borders, part.positions, side="right") - 1
            nats += np.bincount(section, part.nats, len(self))
            tokens += np.bincount(section, minlength=len(self))
        unpredicted = self.unspelled + self.begins if isolated_documents else self.unspelled.copy()
        unpredicted[0] += self.first_bytes if no_first else 0.0
        return SectionScores(
            nats=nats + NATS_PER_BYTE * unpredicted,
            bytes=self.bytes,
            tokens=tokens,
            unpredicted=unpredicted,
            unknown=self.unknown,
            characters=self.characters,
        )


def cut_sections(
    text: Tokens, tokenizer: Tokenizer, *, max_bytes: int | None = None, max_sections: int = MAX_SECTIONS
) -> Sections:
    """Cut a text into sections; with `max_bytes`, only those that begin in its first `max_bytes`."""
    borders = _byte_borders(text.sections, max_bytes, max_sections)
    count, first_bytes = len(borders) - 1, 0.0
    firsts = np.full(count + 1, len(text), dtype=np.int64)
    contents = np.zeros((5, count + 1))  # the last column collects tokens after the last section
    for part in spell_tokens(text, tokenizer):
        section = np.searchsorted(borders, part.offsets, side="right") - 1
        numbers, first = np.unique(section, return_index=True)
        firsts[numbers] = np.minimum(firsts[numbers], part.first + first)
        begins = np.where(part.begins, part.sizes, 0.0)
        first_bytes = float(part.sizes[0]) if part.first == 0 and len(part.sizes) else first_bytes
        for row, each in zip(contents, (part.missing, begins, part.unknown, part.characters, part.sizes), strict=True):
            row += np.bincount(section, each, count + 1)
        offsets, missing = part.empty
        contents[0] += np.bincount(np.searchsorted(borders, offsets, side="right") - 1, missing, count + 1)
        if count in numbers:
            break
    # a section without tokens begins where the next one does
    firsts = np.minimum.accumulate(firsts[::-1])[::-1]
    sizes, (unspelled, begins, unknown, characters, spelled) = np.diff(borders), contents[:, :-1]
    return Sections(
        borders=firsts,
        bytes=sizes,
        unspelled=unspelled,
        begins=begins,
        unknown=unknown.astype(np.int64),
        characters=characters * (sizes.sum() / spelled.sum()) if spelled.any() else sizes.astype(np.float64),
        first_bytes=first_bytes,
    )


def concatenate_scores(scores: Sequence[SectionScores]) -> SectionScores:
    """Return the sections of several texts, one after another."""
    names = [field.name for field in fields(SectionScores)]
    return SectionScores(**{name: np.concatenate([getattr(each, name) for each in scores]) for name in names})


def section_metrics(scores: SectionScores) -> dict[str, Any]:
    """Return the metrics of a text by name, their intervals, and its size."""
    total = scores.score
    return {
        **total.metrics(),
        "bits_per_character": scores.bits_per_byte * float(scores.bytes.sum() / scores.characters.sum()),
        "unknown_share": total.unknown_share,
        "tokens": total.tokens,
        "bytes": total.bytes,
        "characters": round(float(scores.characters.sum())),
        "sections": len(scores.nats),
        "intervals": {name: list(interval) for name, interval in scores.intervals().items()},
    }


def _byte_borders(stored: Ids, max_bytes: int | None, max_sections: int) -> Ids:
    _, sizes, numbers = stored
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    documents = np.add.reduceat(sizes, begins) if len(begins) else sizes
    total = int(documents.sum())
    if not total:
        raise DataError("the text to evaluate is empty")
    read = total if max_bytes is None else min(max_bytes, total)
    longest, shortest = max(MIN_PIECE_BYTES, -(-read // MAX_PIECES)), read / max_sections
    borders, at, pending = [0], 0, 0  # pending: bytes of short documents since the last border
    for size in documents.tolist():
        if borders[-1] >= read:
            break
        if pending and pending + size > longest:
            borders.append(at)
            pending = 0
        pieces = max(1, -(-size // longest))
        borders += [at + size * piece // pieces for piece in range(1, pieces)]
        at += size
        pending = pending + size if pieces == 1 else longest
        if pending >= shortest:
            borders.append(at)
            pending = 0
    if pending:
        borders.append(at)
    return np.array(borders[: sum(border < read for border in borders) + 1], dtype=np.int64)
