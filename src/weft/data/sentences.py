"""Pairs of sentences, the second of which is the next one in half of them: BERT's next-sentence task (Devlin et al.
2019, §3.1).

A pair depends on the seed and on its number among all samples of the run, and on nothing else, as in
`data/corrupt.py`, which masks its words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft.data.batch import Batch
from weft.data.config import TextSource
from weft.data.corrupt import PAIRING, Flags, Masking
from weft.data.examples import Examples
from weft.data.sampler import Array, draw, permute, streams
from weft.data.shards import Side
from weft.data.split import Section, split_sections
from weft.errors import DataError, TokenizerError
from weft.text.sentences import split_sentences
from weft.text.tokenizer import Tokenizer

SHORTER = 0.1  # of the sentence pairs
CHUNK = 512  # sentences that are encoded together


def sentence_examples(
    text: TextSource, tokenizer: Tokenizer, read: Counter[Side]
) -> Iterator[tuple[Side, dict[str, Any]]]:
    """Every sentence of a text that has a token, its side and its document's number there: what `write_sides` takes.
    `read` counts the bytes of each side."""

    def counted() -> Iterator[Section]:
        for section in split_sections(text):
            read[section.side] += section.size
            yield section

    sentences = document_sentences(counted())
    while chunk := list(islice(sentences, CHUNK)):
        encoded = tokenizer.encode_batch([words for _, words, _ in chunk])
        for ids, (side, _, document) in zip(encoded, chunk, strict=True):
            if ids:
                yield side, {"tokens": ids, "document": document}


def document_sentences(sections: Iterable[Section]) -> Iterator[tuple[Side, str, int]]:
    """(side, sentence, document) of all sentences. The last one of a section may go on in the document's next."""
    last: dict[Side, Section] = {}
    rest: dict[Side, str] = {"train": "", "validation": ""}
    for section in sections:
        side, before = section.side, last.get(section.side)
        if before is not None and (before.ends or before.document != section.document):
            yield from ((side, sentence, before.document) for sentence in split_sentences(rest[side]))
            rest[side] = ""
        *whole, rest[side] = split_sentences(rest[side] + section.text) or [""]
        yield from ((side, sentence, section.document) for sentence in whole)
        last[side] = section
    for side, before in last.items():
        yield from ((side, sentence, before.document) for sentence in split_sentences(rest[side]))


class Sentences:
    """Sentences with their documents: what next-sentence pairs are drawn from."""

    def __init__(self, source: Examples) -> None:
        """`source`: sentences in the order of the text, their ids in `tokens`, their documents' numbers in `document`.
        Refuses a source from which no pair can be drawn."""
        self.tokens = source.joined("tokens")  # of all sentences
        numbers = np.asarray(source.values("document"))
        # ends[i] is the number of tokens up to and with sentence i; borders[d] the first sentence of document d
        lengths = np.asarray(source.lengths("tokens"), dtype=np.int64)
        assert (lengths > 0).all(), "a sentence has a token at least"
        self.ends = np.cumsum(lengths)
        self.borders = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])) if len(numbers) else np.arange(0)
        self.borders = np.append(self.borders, len(numbers))
        if self.documents < 2:
            needed = "half of the sentence pairs come from another one; provide two or more"
            raise DataError(f"{self.documents} document: {needed}")
        if not len(self.leading):
            raise DataError("every document is a single sentence: there is no next one; join them, or mask words only")

    @property
    def documents(self) -> int:
        return len(self.borders) - 1

    @cached_property
    def leading(self) -> Array:
        """The sentences that have a next one in the same document."""
        last = np.zeros(len(self.ends), dtype=bool)
        last[self.borders[1:] - 1] = True
        return np.flatnonzero(~last)

    def per_epoch(self, length: int) -> int:
        """How many pairs of `length` tokens hold about as much as all sentences do."""
        return max(1, int(self.ends[-1]) // (length - 3))

    def places(self, samples: npt.ArrayLike, seed: int, length: int) -> Array:
        """The tokens at which these samples begin to look for their text: (samples,). An epoch looks at `per_epoch`
        stretches of the text, each once, in an order of its own."""
        count = self.per_epoch(length)
        epoch, place = np.divmod(np.asarray(samples, dtype=np.int64), count)
        return permute(place, count, epoch, seed) * self.ends[-1] // count

    def first(self, tokens: Array) -> Array:
        """The sentences that hold these tokens, or the nearest before them that have a next one."""
        sentences = np.searchsorted(self.ends, tokens, side="right")
        return self.leading[np.maximum(np.searchsorted(self.leading, sentences, side="right") - 1, 0)]

    def passage(self, first: Array, tokens: Array) -> tuple[Array, Array]:
        """The first sentences, and those after the last, of passages of one document that reach `tokens` tokens. They
        begin with `first`, or earlier where the document ends too soon."""
        document = np.searchsorted(self.borders, first, side="right")
        begin, stop = self.borders[document - 1], self.borders[document]
        last = np.searchsorted(self.ends, self.ends[stop - 1] - tokens, side="right")  # to begin with, at the latest
        first = np.maximum(begin, np.minimum(first, last))
        return first, np.minimum(stop, np.searchsorted(self.ends, self.start(first) + tokens) + 1)

    def start(self, sentences: Array) -> Array:
        """Where these sentences begin among all tokens."""
        return np.where(sentences > 0, self.ends[sentences - 1], 0)


class Pairs(NamedTuple):
    """Two passages a row, each as its first token among all and how many it has, and whether b comes next: (B,)."""

    a: Array
    a_length: Array
    b: Array
    b_length: Array
    is_next: Flags


def sentence_pairs(sentences: Sentences, samples: npt.ArrayLike, seed: int, length: int) -> Pairs:
    """For each sample two passages that fit into [CLS] a [SEP] b [SEP] of `length` tokens, and whether b comes next.

    As BERT draws them (Devlin et al. 2019, §3.1 and appendix A.2): whole sentences up to the length, or in a tenth of
    the pairs up to a shorter one, cut in two at random. Half the time the second part is given up for sentences of
    another document. Where the last sentence is too long, a loses its beginning or b its end, so that what is left
    still touches.
    """
    space = length - 3
    stretch = int(sentences.ends[-1]) / sentences.per_epoch(length)
    own = streams(samples, seed, PAIRING)

    def between(low: Array | int, high: Array | int, place: int) -> Array:
        return low + (draw(own, place) * (high - low)).astype(np.int64)

    target = np.where(draw(own, 0) < SHORTER, between(2, space + 1, 1), space)
    token = sentences.places(samples, seed, length) + (stretch * draw(own, 2)).astype(np.int64)
    first, stop = sentences.passage(sentences.first(token), target)
    stop = np.maximum(stop, first + 2)  # two sentences at least, however long
    middle = between(first + 1, stop, 3)
    a, a_length = sentences.start(first), sentences.start(middle) - sentences.start(first)
    is_next = draw(own, 4) < 0.5
    document = np.searchsorted(sentences.borders, first, side="right") - 1
    other = between(0, sentences.documents - 1, 5)
    other += other >= document
    anywhere = between(sentences.borders[other], sentences.borders[other + 1], 6)
    begin, end = sentences.passage(anywhere, np.maximum(1, target - a_length))
    begin, end = np.where(is_next, middle, begin), np.where(is_next, stop, end)
    b, b_length = sentences.start(begin), sentences.ends[end - 1] - sentences.start(begin)
    b_length = np.minimum(b_length, np.maximum(space - a_length, space // 2))
    lost = np.maximum(0, a_length + b_length - space)
    return Pairs(a + lost, a_length - lost, b, b_length, is_next)


def next_sentence_batch(
    sentences: Sentences, masking: Masking, samples: npt.ArrayLike, *, seed: int, length: int
) -> Batch:
    """Rows (B, length) of [CLS] a [SEP] b [SEP] and padding, words masked: what BERT reads at a step. `samples` are all
    of the step's: the weight of the second task depends on how many targets there are in all rows."""
    if masking.cls_id is None or masking.sep_id is None or masking.pad_id is None:
        raise TokenizerError("sentence pairs need a tokenizer with cls, sep and pad tokens, as wordpiece has them")
    if length < 5:
        raise DataError(f"batch.length = {length}: [CLS] a [SEP] b [SEP] needs 5 tokens at least")
    pairs = sentence_pairs(sentences, samples, seed, length)
    place = np.arange(length)
    middle, end = (pairs.a_length + 1)[:, None], (pairs.a_length + pairs.b_length + 2)[:, None]  # where [SEP] stands
    second, real = (place > middle) & (place <= end), place <= end
    begin = np.where(second, (pairs.b - pairs.a_length - 2)[:, None], (pairs.a - 1)[:, None])
    special = (place == 0) | (place == middle) | (place >= end)
    ids = sentences.tokens[np.where(special, 0, begin + place)].astype(np.int64)
    ids = np.where(special, np.where(real, masking.sep_id, masking.pad_id), ids)
    ids[:, 0] = masking.cls_id
    inputs, chosen = masking.mask(ids, samples, seed)
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(ids),
        loss_mask=torch.from_numpy(chosen),
        mask=torch.from_numpy(real),
        segments=torch.from_numpy(second.astype(np.int64)),
        next_sentence=torch.from_numpy(pairs.is_next.astype(np.int64)),
        next_sentence_weight=torch.full((len(ids),), float(chosen.sum()) / len(ids)),
    )
