"""Breakdown of a text's loss: by the length of the context, by token frequency, and the most surprising passages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.data.shards import Ids, Tokens
from weft.evaluate.overlap import passages_table
from weft.evaluate.perplexity import TokenScores, perplexity
from weft.evaluate.unspelled import spell_tokens
from weft.figures.formats import fixed
from weft.figures.tables import Table
from weft.text.tokenizer import Tokenizer

BLOCK = 1 << 20  # tokens counted at a time
MAX_PASSAGES = 10  # shown in a table
PASSAGE_TOKENS = 20  # per passage


class LossBucket(NamedTuple):
    """A group of tokens and the sum of their losses."""

    name: str
    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        return self.nats / self.tokens


class Passage(NamedTuple):
    """Consecutive tokens: their text and document, counted from 1, the byte offset in it, and the mean loss in nats."""

    text: int
    document: int
    byte: int
    loss: float
    words: str


@dataclass(frozen=True)
class TextCosts:
    """A text and the scores of its tokens, in the order of the text."""

    text: Tokens
    scores: TokenScores

    @classmethod
    def of(cls, text: Tokens, parts: Iterator[TokenScores]) -> "TextCosts":
        """Sort scores that come in any order."""
        positions, nats, context = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(positions, kind="stable")
        return cls(text, TokenScores(positions[order], nats[order], context[order]))


@dataclass(frozen=True)
class Details:
    """Metrics of a text and their breakdown. `frequencies` are empty if the training text no longer exists."""

    metrics: Mapping[str, Any]
    positions: Sequence[LossBucket]
    frequencies: Sequence[LossBucket]
    passages: Sequence[Passage]

    def tables(self, max_characters: int = 44) -> list[Table]:
        """Return the breakdown as tables, with up to `max_characters` of each passage."""
        tables = [_buckets_table("Loss by tokens seen before", "seen before", self.positions)]
        if self.frequencies:
            tables.append(_buckets_table("Loss by occurrences in the training text", "occurs", self.frequencies))
        rows = [(f"{each.loss:.2f}", each.text, each.document, each.byte, each.words) for each in self.passages]
        header = ("loss", "passage")
        return [*tables, passages_table("The most surprising passages", header, rows, max_characters=max_characters)]


def by_position(costs: Sequence[TextCosts]) -> list[LossBucket]:
    """Group tokens by the number of tokens before them: 1, 2–3, 4–7 … up to the window, or more with carried states."""
    context = np.concatenate([each.scores.context for each in costs])
    exponents = np.where(context > 0, np.frexp(context.astype(np.float64))[1], 0)  # 1 for 1, 2 for 2–3, 3 for 4–7
    longest = int(context.max())
    return _buckets(exponents, ["none", *(_range_name(1 << n, min((2 << n) - 1, longest)) for n in range(64))], costs)


def by_frequency(costs: Sequence[TextCosts], counts: Ids) -> list[LossBucket]:
    """Group tokens by their number of occurrences in the training text: never, 1–9, 10–99 …"""
    occurrences = counts[np.concatenate([each.text.read(0, len(each.text))[each.scores.positions] for each in costs])]
    digits = np.searchsorted(10 ** np.arange(18), occurrences, side="right")
    return _buckets(digits, ["never", *(_range_name(10**n, 10 ** (n + 1) - 1) for n in range(18))], costs)


def token_counts(texts: Sequence[Tokens], vocab_size: int) -> Ids:
    """Count the occurrences (vocab_size,) of each token in the texts."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        for start in range(0, len(text), BLOCK):
            counts += np.bincount(text.read(start, min(BLOCK, len(text) - start)), minlength=vocab_size)
    return counts


def most_surprising(
    costs: Sequence[TextCosts], tokenizer: Tokenizer, *, count: int = MAX_PASSAGES, length: int = PASSAGE_TOKENS
) -> list[Passage]:
    """Return the passages of `length` tokens with the highest mean loss, highest first; they don't overlap."""
    windows = [(loss, index, first) for index, each in enumerate(costs) for first, loss in _worst(each, count, length)]
    passages = []
    for loss, index, first in sorted(windows, reverse=True)[:count]:
        text = costs[index].text
        words = tokenizer.decode(text.read(first, min(length, len(text) - first)))
        document, byte = _locate(text, tokenizer, first)
        passages.append(Passage(index + 1, document, byte, loss=loss, words=words))
    return passages


def _worst(costs: TextCosts, count: int, length: int) -> list[tuple[int, float]]:
    """(first token, mean loss) of the worst windows of a text, inside documents if those are long enough."""
    positions, nats, _ = costs.scores
    length = min(length, len(nats))
    sums = np.cumsum(np.concatenate([[0.0], nats]))
    means = (sums[length:] - sums[:-length]) / length
    documents = costs.text.documents(0, len(costs.text))[positions]
    inside = documents[length - 1 :] == documents[: len(means)]
    if inside.any():
        means[~inside] = -np.inf
    windows = []
    for _ in range(count):
        at = int(np.argmax(means))
        if means[at] == -np.inf:
            break
        windows.append((int(positions[at]), float(means[at])))
        means[max(0, at - length + 1) : at + length] = -np.inf
    return windows


def _locate(text: Tokens, tokenizer: Tokenizer, token: int) -> tuple[int, int]:
    """Document of a token, counted from 1, and the byte offset of the token in it."""
    part = next(part for part in spell_tokens(text, tokenizer, token) if token < part.first + len(part.offsets))
    byte = int(part.offsets[token - part.first])
    _, sizes, numbers = text.sections
    begins = (np.cumsum(sizes) - sizes)[np.flatnonzero(np.diff(numbers, prepend=-1))]
    document = int(np.searchsorted(begins, byte, side="right"))
    return document, byte - int(begins[document - 1])


def _buckets(numbers: Ids, names: Sequence[str], costs: Sequence[TextCosts]) -> list[LossBucket]:
    tokens, sums = np.bincount(numbers), np.bincount(numbers, np.concatenate([each.scores.nats for each in costs]))
    return [LossBucket(names[n], int(tokens[n]), float(sums[n])) for n in np.flatnonzero(tokens).tolist()]


def _range_name(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _buckets_table(title: str, first: str, buckets: Sequence[LossBucket]) -> Table:
    tokens, nats, rows = sum(each.tokens for each in buckets), sum(each.nats for each in buckets), []
    for each in buckets:
        share, of_loss = f"{each.tokens / tokens:.1%}", f"{each.nats / nats:.1%}" if nats else "–"
        loss = (fixed(each.loss), fixed(perplexity(each.loss), ",.2f"))
        rows.append((each.name, f"{each.tokens:,}", share, *loss, of_loss))
    return Table((first, "tokens", "of all", "loss", "perplexity", "of the loss"), rows, title)
