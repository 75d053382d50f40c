"""Sentence pairs for BERT's next-sentence prediction: in half of them the second follows the first (Devlin et al.
2019, §3.1).

A pair depends only on the seed and on its number among all samples of the run, as in `data/corrupt.py`, which masks its
words.
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
from weft.data.split import TextSection, split_sections
from weft.errors import DataError, TokenizerError
from weft.text.sentences import split_sentences
from weft.text.tokenizer import Tokenizer

SHORT_PAIRS = 0.1  # fraction of the pairs that are shorter than the row
CHUNK = 512  # sentences encoded in one call


def sentence_examples(
    text: TextSource, tokenizer: Tokenizer, read: Counter[Side]
) -> Iterator[tuple[Side, dict[str, Any]]]:
    """Yield an example for `write_sides` for each sentence of a text that has tokens: its side, its ids and its
    document's number on that side. `read` is incremented by the bytes read of each side."""

    def sections() -> Iterator[TextSection]:
        for section in split_sections(text):
            read[section.side] += section.size
            yield section

    sentences = document_sentences(sections())
    while chunk := list(islice(sentences, CHUNK)):
        encoded = tokenizer.encode_batch([sentence for _, sentence, _ in chunk])
        for ids, (side, _, document) in zip(encoded, chunk, strict=True):
            if ids:
                yield side, {"tokens": ids, "document": document}


def document_sentences(sections: Iterable[TextSection]) -> Iterator[tuple[Side, str, int]]:
    """Yield (side, sentence, document) for all sentences. A section's last sentence may continue in the next one."""
    last: dict[Side, TextSection] = {}
    unfinished: dict[Side, str] = {"train": "", "validation": ""}
    for section in sections:
        side, before = section.side, last.get(section.side)
        if before is not None and (before.ends or before.document != section.document):
            yield from ((side, sentence, before.document) for sentence in split_sentences(unfinished[side]))
            unfinished[side] = ""
        *complete, unfinished[side] = split_sentences(unfinished[side] + section.text) or [""]
        yield from ((side, sentence, section.document) for sentence in complete)
        last[side] = section
    for side, before in last.items():
        yield from ((side, sentence, before.document) for sentence in split_sentences(unfinished[side]))


class Sentences:
    """Sentences grouped by document, from which sentence pairs are drawn."""

    def __init__(self, source: Examples) -> None:
        """`source`: sentences in text order, ids in `tokens`, document numbers in `document`. DataError if no pair can
        be drawn from it."""
        self.tokens = source.flat_ids("tokens")
        numbers = np.asarray(source.values("document"))
        # ends[i]: number of tokens up to the end of sentence i; borders[d]: the first sentence of document d
        lengths = np.asarray(source.lengths("tokens"), dtype=np.int64)
        assert (lengths > 0).all(), "every sentence has at least one token"
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
        """Sentences that have a next sentence in the same document."""
        last = np.zeros(len(self.ends), dtype=bool)
        last[self.borders[1:] - 1] = True
        return np.flatnonzero(~last)

    def per_epoch(self, length: int) -> int:
        """Number of pairs of `length` tokens that hold about as many tokens as all sentences."""
        return max(1, int(self.ends[-1]) // (length - 3))

    def offsets(self, samples: npt.ArrayLike, seed: int, length: int) -> Array:
        """Token offsets at which the stretches of these samples begin: (samples,). An epoch visits `per_epoch` equal
        stretches of the text, each once, in random order."""
        count = self.per_epoch(length)
        epoch, index = np.divmod(np.asarray(samples, dtype=np.int64), count)
        return permute(index, count, epoch, seed=seed) * self.ends[-1] // count

    def first(self, tokens: Array) -> Array:
        """Sentences that contain these tokens, or the nearest earlier ones that have a next sentence."""
        sentences = np.searchsorted(self.ends, tokens, side="right")
        return self.leading[np.maximum(np.searchsorted(self.leading, sentences, side="right") - 1, 0)]

    def passage(self, first: Array, tokens: Array) -> tuple[Array, Array]:
        """Half-open ranges of sentences, each in one document, that reach `tokens` tokens. They begin with `first`, or
        earlier if the document ends too soon."""
        document = np.searchsorted(self.borders, first, side="right")
        begin, stop = self.borders[document - 1], self.borders[document]
        latest = np.searchsorted(self.ends, self.ends[stop - 1] - tokens, side="right")
        first = np.maximum(begin, np.minimum(first, latest))
        return first, np.minimum(stop, np.searchsorted(self.ends, self.start(first) + tokens) + 1)

    def start(self, sentences: Array) -> Array:
        """Token offsets at which these sentences begin."""
        return np.where(sentences > 0, self.ends[sentences - 1], 0)


class SentencePairs(NamedTuple):
    """Two passages per row, each as its token offset and length, and whether b follows a: (B,) each."""

    a: Array
    a_length: Array
    b: Array
    b_length: Array
    is_next: Flags


def sentence_pairs(sentences: Sentences, samples: npt.ArrayLike, *, seed: int, length: int) -> SentencePairs:
    """Draw two passages for each sample that fit into [CLS] a [SEP] b [SEP] of `length` tokens, and whether b follows.

    As BERT does (Devlin et al. 2019, §3.1 and appendix A.2): whole sentences up to the length, or in a tenth of the
    pairs up to a shorter one, are divided in two at random. Half the time, sentences of another document replace the
    second part. If the pair is too long, a loses its beginning or b its end, so that the two stay adjacent.
    """
    space = length - 3
    stretch = int(sentences.ends[-1]) / sentences.per_epoch(length)
    rng = streams(samples, seed, PAIRING)

    def uniform(low: Array | int, high: Array | int, position: int) -> Array:
        return low + (draw(rng, position) * (high - low)).astype(np.int64)

    target = np.where(draw(rng, 0) < SHORT_PAIRS, uniform(2, space + 1, 1), space)
    token = sentences.offsets(samples, seed, length) + (stretch * draw(rng, 2)).astype(np.int64)
    first, stop = sentences.passage(sentences.first(token), target)
    stop = np.maximum(stop, first + 2)  # at least two sentences, even if they are too long
    middle = uniform(first + 1, stop, 3)
    a, a_length = sentences.start(first), sentences.start(middle) - sentences.start(first)
    is_next = draw(rng, 4) < 0.5
    document = np.searchsorted(sentences.borders, first, side="right") - 1
    other = uniform(0, sentences.documents - 1, 5)
    other += other >= document
    other_first = uniform(sentences.borders[other], sentences.borders[other + 1], 6)
    begin, end = sentences.passage(other_first, np.maximum(1, target - a_length))
    begin, end = np.where(is_next, middle, begin), np.where(is_next, stop, end)
    b, b_length = sentences.start(begin), sentences.ends[end - 1] - sentences.start(begin)
    b_length = np.minimum(b_length, np.maximum(space - a_length, space // 2))
    excess = np.maximum(0, a_length + b_length - space)
    return SentencePairs(a + excess, a_length - excess, b=b, b_length=b_length, is_next=is_next)


def next_sentence_batch(
    sentences: Sentences, masking: Masking, samples: npt.ArrayLike, *, seed: int, length: int
) -> Batch:
    """Batch of BERT: rows (B, length) of [CLS] a [SEP] b [SEP] and padding, words masked. `samples` must be all those
    of the step, because the weight of the next-sentence loss depends on the number of targets in all rows."""
    if masking.cls_id is None or masking.sep_id is None or masking.pad_id is None:
        raise TokenizerError("sentence pairs need a tokenizer with cls, sep and pad tokens, as wordpiece has them")
    if length < 5:
        raise DataError(f"batch.length = {length}: [CLS] a [SEP] b [SEP] needs at least 5 tokens")
    pairs = sentence_pairs(sentences, samples, seed=seed, length=length)
    position = np.arange(length)
    middle, end = (pairs.a_length + 1)[:, None], (pairs.a_length + pairs.b_length + 2)[:, None]  # positions of [SEP]
    second, real = (position > middle) & (position <= end), position <= end
    begin = np.where(second, (pairs.b - pairs.a_length - 2)[:, None], (pairs.a - 1)[:, None])
    special = (position == 0) | (position == middle) | (position >= end)
    ids = sentences.tokens[np.where(special, 0, begin + position)].astype(np.int64)
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
