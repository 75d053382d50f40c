"""What a text's loss is made of: by tokens seen before, by how often a token was learned, and the worst passages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weft.data.shards import Ids, Tokens
from weft.evaluate.overlap import passages_table
from weft.evaluate.perplexity import TokenScores, perplexity
from weft.evaluate.unspelled import spelled
from weft.figures.tables import Table
from weft.text.tokenizer import Tokenizer

READ = 1 << 20  # tokens counted at a time
PASSAGES = 10  # that are shown
PASSAGE = 20  # tokens of one


class Bucket(NamedTuple):
    """Tokens of a kind, and what they cost together."""

    name: str
    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        return self.nats / self.tokens


class Passage(NamedTuple):
    """Some tokens that follow each other: where they stand, counted from 1 but bytes, and their mean cost in nats."""

    text: int
    document: int
    byte: int
    loss: float
    words: str


@dataclass(frozen=True)
class TextCosts:
    """A text and what each of its tokens costs, in the order of the text."""

    text: Tokens
    scores: TokenScores

    @classmethod
    def of(cls, text: Tokens, parts: Iterator[TokenScores]) -> "TextCosts":
        """From costs in any order."""
        places, nats, seen = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(places, kind="stable")
        return cls(text, TokenScores(places[order], nats[order], seen[order]))


@dataclass(frozen=True)
class Details:
    """The metrics of a text with what they are made of. `frequencies` are empty where the training text is gone."""

    metrics: Mapping[str, Any]
    positions: Sequence[Bucket]
    frequencies: Sequence[Bucket]
    passages: Sequence[Passage]

    def tables(self, most: int = 44) -> list[Table]:
        """All of it in numbers; of a passage so many characters."""
        tables = [_buckets_table("Loss by tokens seen before", "seen before", self.positions)]
        if self.frequencies:
            tables.append(_buckets_table("Loss by occurrences in the training text", "occurs", self.frequencies))
        passages = [(f"{each.loss:.2f}", each.text, each.document, each.byte, each.words) for each in self.passages]
        return [*tables, passages_table("The most surprising passages", ("loss", "passage"), passages, most)]


def by_position(costs: Sequence[TextCosts]) -> list[Bucket]:
    """By the tokens that were seen before: 1, 2–3, 4–7 … up to the window, or further where states are carried."""
    seen = np.concatenate([each.scores.seen for each in costs])
    exponents = np.where(seen > 0, np.frexp(seen.astype(np.float64))[1], 0)  # 1 for 1, 2 for 2–3, 3 for 4–7
    most = int(seen.max())
    names = ["none", *(_between(1 << n, min((2 << n) - 1, most)) for n in range(64))]
    return _buckets(exponents, names, costs)


def by_frequency(costs: Sequence[TextCosts], counts: Ids) -> list[Bucket]:
    """By how often a token occurs in the training text: never, 1–9, 10–99 …"""
    known = counts[np.concatenate([each.text.read(0, len(each.text))[each.scores.places] for each in costs])]
    digits = np.searchsorted(10 ** np.arange(18), known, side="right")
    names = ["never", *(_between(10**n, 10 ** (n + 1) - 1) for n in range(18))]
    return _buckets(digits, names, costs)


def token_counts(texts: Sequence[Tokens], vocab_size: int) -> Ids:
    """How often each token occurs in some texts: (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for text in texts:
        for start in range(0, len(text), READ):
            counts += np.bincount(text.read(start, min(READ, len(text) - start)), minlength=vocab_size)
    return counts


def most_surprising(
    costs: Sequence[TextCosts], tokenizer: Tokenizer, most: int = PASSAGES, length: int = PASSAGE
) -> list[Passage]:
    """The passages of `length` tokens with the highest mean cost that don't overlap, the highest first."""
    found = [(loss, number, first) for number, each in enumerate(costs) for first, loss in _highest(each, most, length)]
    passages = []
    for loss, number, first in sorted(found, reverse=True)[:most]:
        text = costs[number].text
        words = tokenizer.decode(text.read(first, min(length, len(text) - first)))
        passages.append(Passage(number + 1, *_where(text, tokenizer, first), loss, words))
    return passages


def _highest(costs: TextCosts, most: int, length: int) -> list[tuple[int, float]]:
    """(first token, mean cost) of the costliest windows of a text, inside of documents where those are long enough."""
    places, nats, _ = costs.scores
    length = min(length, len(nats))
    sums = np.cumsum(np.concatenate([[0.0], nats]))
    means = (sums[length:] - sums[:-length]) / length
    documents = costs.text.documents(0, len(costs.text))[places]
    inside = documents[length - 1 :] == documents[: len(means)]
    if inside.any():
        means[~inside] = -np.inf
    found = []
    for _ in range(most):
        at = int(np.argmax(means))
        if means[at] == -np.inf:
            break
        found.append((int(places[at]), float(means[at])))
        means[max(0, at - length + 1) : at + length] = -np.inf
    return found


def _where(text: Tokens, tokenizer: Tokenizer, token: int) -> tuple[int, int]:
    """The document of a token, counted from 1, and at which byte of it the token begins."""
    part = next(part for part in spelled(text, tokenizer, token) if token < part.first + len(part.places))
    byte = int(part.places[token - part.first])
    _, sizes, numbers = text.sections
    begins = (np.cumsum(sizes) - sizes)[np.flatnonzero(np.diff(numbers, prepend=-1))]
    document = int(np.searchsorted(begins, byte, side="right"))
    return document, byte - int(begins[document - 1])


def _buckets(numbers: Ids, names: Sequence[str], costs: Sequence[TextCosts]) -> list[Bucket]:
    nats = np.concatenate([each.scores.nats for each in costs])
    tokens, sums = np.bincount(numbers), np.bincount(numbers, nats)
    return [Bucket(names[n], int(tokens[n]), float(sums[n])) for n in np.flatnonzero(tokens).tolist()]


def _between(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _buckets_table(title: str, first: str, buckets: Sequence[Bucket]) -> Table:
    tokens, nats, rows = sum(each.tokens for each in buckets), sum(each.nats for each in buckets), []
    for each in buckets:
        share, of_loss = f"{each.tokens / tokens:.1%}", f"{each.nats / nats:.1%}" if nats else "–"
        loss = (f"{each.loss:.3f}", f"{perplexity(each.loss):,.2f}")
        rows.append((each.name, f"{each.tokens:,}", share, *loss, of_loss))
    return Table((first, "tokens", "of all", "loss", "perplexity", "of the loss"), rows, title)
