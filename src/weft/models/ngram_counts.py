"""Counts of n-grams as a trie of sorted arrays, built from a long token array in bounded memory.

Level n holds the distinct n-grams in lexicographic order, so that the n-grams which begin with one context lie side
by side: the context's own place in level n − 1 says where they start. An n-gram costs 4 bytes for its last word,
4 for its count and, below the highest order, 4 for where its continuations start.

Sequences begin with what there is: the first token of a document has no context, the second has one word, and so on.
No n-gram reaches over the boundary between two documents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.models.base import check_range

Array = NDArray[Any]
Ints = NDArray[Any]  # whole numbers, in 4 bytes or in 8

BLOCK = 1 << 16  # queries looked up together: few enough to stay in a core's cache
CHUNK = 1 << 25  # tokens counted together: 8 bytes each while they are sorted
RUNS = 4  # chunks held before they are merged


@dataclass
class Level:
    """The distinct n-grams of one length. `starts[i]` to `starts[i + 1]` are the continuations of n-gram i."""

    words: Ints  # (n-grams,) the last word
    counts: Ints  # (n-grams,)
    starts: Ints  # (n-grams + 1,) places in the next level; empty at the highest order

    def __len__(self) -> int:
        return len(self.words)


Trie = list[Level]


def narrow(values: Ints) -> Ints:
    """The same numbers in 4 bytes each, or in 8 where one of them needs it."""
    small = not len(values) or int(values.max()) < 2**31
    return values.astype(np.int32 if small else np.int64, copy=False)


class Documents(NamedTuple):
    """tokens (time,), a memory-mapped array too, and the places where a document begins, in rising order."""

    tokens: Ints
    starts: NDArray[np.int64]

    def part(self, low: int, high: int) -> "Documents":
        """The tokens from `low` to `high`, and where documents begin among them."""
        tokens = np.asarray(self.tokens[low:high])
        first, last = np.searchsorted(self.starts, [low, low + len(tokens)])
        return Documents(tokens, self.starts[first:last] - low)


def document_starts(tokens: int, boundaries: Array | None) -> NDArray[np.int64]:
    """Where documents begin, 0 among them, from rising offsets with or without 0 and the end."""
    offsets = np.asarray([] if boundaries is None else boundaries, dtype=np.int64)
    assert bool((np.diff(offsets, prepend=0, append=tokens) >= 0).all()), "document boundaries rise from 0 to the end"
    return np.unique(np.append(0, offsets[offsets < tokens]))


def find(above: Level, level: Level, parents: Ints, words: Ints) -> NDArray[np.int64]:
    """Places in `level` of the n-grams made of a context, by its place in `above`, and a word; −1 where unseen.

    A parent of −1 is an unseen context. A binary search runs in each context's own continuations, for many queries
    at once; they are ordered by the steps they need, so that those which are done drop off the end.
    """
    found = np.full(len(parents), -1, dtype=np.int64)
    if not len(level):
        return found
    probe, half = np.empty(BLOCK, dtype=np.int64), np.empty(BLOCK, dtype=np.int64)
    for low in range(0, len(parents), BLOCK):
        asked = np.flatnonzero(parents[low : low + BLOCK] >= 0)
        contexts = parents[low : low + BLOCK].take(asked)
        begin = above.starts.take(contexts)
        size = above.starts.take(contexts + 1) - begin
        steps = np.frexp((size - 1).clip(0).astype(np.float32))[1].astype(np.uint8)  # ⌈log₂ size⌉
        order = np.argsort(steps, kind="stable")[::-1]
        asked, place, size = asked.take(order), begin.take(order).astype(np.int64), size.take(order).astype(np.int64)
        word, some = words[low : low + BLOCK].take(asked), size > 0
        place -= 1  # the word before the candidates: it is known to be smaller, or of another context
        active = len(order)
        for done in np.bincount(steps)[:-1]:
            active -= int(done)
            np.right_shift(size[:active], 1, out=half[:active])
            np.add(place[:active], half[:active], out=probe[:active])
            less = level.words.take(probe[:active], mode="clip") < word[:active]
            np.multiply(half[:active], less, out=probe[:active])
            place[:active] += probe[:active]
            size[:active] -= half[:active]
        place += 1
        hit = (level.words.take(place, mode="clip") == word) & some
        found[asked[hit] + low] = place[hit]
    return found


def lookups(trie: Trie, documents: Documents) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For n = 1, 2, …: the places of the n-gram that ends at each token and of its context, −1 where unseen or none."""
    tokens, starts = documents
    here, words = tokens.astype(np.int64), tokens.astype(np.int32)
    contexts = np.full(len(tokens), -1, dtype=np.int64)
    yield here, contexts
    for above, level in pairwise(trie):
        contexts[1:] = here[:-1]
        contexts[starts] = -1
        # An n-gram is unseen where its last n − 1 words are.
        here = find(above, level, np.where(here >= 0, contexts, -1), words)
        yield here, contexts


def count_ngrams(
    documents: Documents, vocab_size: int, order: int, tick: Callable[[int], None], chunk: int = CHUNK
) -> Trie:
    """The n-grams of documents up to `order` words long, none of them over a document's start.

    Chunks are counted one by one and merged a few at a time, so the memory needed is that of the result and a few
    chunks, however long the text. `tick` is called with every token counted, once for each length.
    """
    runs: list[Trie] = []
    for low in range(0, len(documents.tokens), chunk):
        # The words before the chunk belong to its first contexts, but were counted in the chunk before.
        known = min(low, order - 1)
        part = documents.part(low - known, low + chunk)
        check_ids(part.tokens[known:], vocab_size)
        runs.append(_count_chunk(part, known, vocab_size, order, tick))
        if len(runs) == RUNS:
            runs = [merge(runs)]
    return merge(runs)


def check_ids(tokens: Array, vocab_size: int) -> None:
    assert tokens.ndim == 1 and tokens.dtype.kind in "iu", "tokens are a row of whole numbers"
    if len(tokens):
        check_range(int(tokens.min()), int(tokens.max()), vocab_size)


def _count_chunk(documents: Documents, known: int, vocab_size: int, order: int, tick: Callable[[int], None]) -> Trie:
    tokens, starts = documents.tokens.astype(np.int32), documents.starts
    counts = np.bincount(tokens[known:], minlength=vocab_size)
    trie = [Level(np.arange(vocab_size, dtype=np.int32), narrow(counts), np.empty(0, dtype=np.int32))]
    tick(len(tokens) - known)
    bits = word_bits(vocab_size)
    here: Ints = tokens
    for n in range(2, order + 1):
        contexts = np.full(len(tokens), -1, dtype=here.dtype)
        contexts[1:] = here[:-1]
        contexts[starts] = -1
        real = contexts >= 0
        keys = contexts[real].astype(np.int64)
        keys <<= bits
        keys |= tokens[real]
        keys.sort()
        last = np.flatnonzero(_ends(keys))
        keys = keys[last]
        above, level = trie[-1], _level(trie[-1], keys, narrow(np.diff(last, prepend=-1)), bits)
        trie.append(level)
        seen_before = find(above, level, contexts[:known], tokens[:known])
        np.subtract.at(level.counts, seen_before[seen_before >= 0], 1)
        if n < order:
            here = narrow(find(above, level, contexts, tokens))
        tick(len(tokens) - known)
    return trie


def merge(runs: list[Trie]) -> Trie:
    """One trie with the counts of several. The runs are used up: each level is freed once it is merged."""
    if len(runs) == 1:
        return runs[0]
    bits = word_bits(len(runs[0][0]))
    nothing = Level(*(np.empty(0, dtype=np.int32) for _ in range(3)))
    unigrams = np.asarray(np.sum([run[0].counts for run in runs], axis=0, dtype=np.int64))
    trie = [Level(runs[0][0].words, narrow(unigrams), np.empty(0, dtype=np.int32))]
    places: list[Ints] = [runs[0][0].words for _ in runs]  # of each run's n-grams in the merged level
    for n in range(1, len(runs[0])):
        keys = np.empty(sum(len(run[n]) for run in runs), dtype=np.int64)
        ends = np.cumsum([len(run[n]) for run in runs])
        for i, run in enumerate(runs):
            keys[ends[i] - len(run[n]) : ends[i]] = _keys(run[n - 1], run[n], places[i], bits)
        keys.sort()
        keys = keys[_ends(keys)]
        counts = np.zeros(len(keys), dtype=np.int64)
        for i, run in enumerate(runs):
            places[i] = narrow(np.searchsorted(keys, _keys(run[n - 1], run[n], places[i], bits)))
            counts[places[i]] += run[n].counts
            run[n - 1] = nothing
        trie.append(_level(trie[-1], keys, narrow(counts), bits))
    return trie


def word_bits(vocab_size: int) -> int:
    """Bits that a word takes beside its context's place in one 64-bit key."""
    return max(1, (vocab_size - 1).bit_length())


def _keys(above: Level, level: Level, places: Ints, bits: int) -> NDArray[np.int64]:
    """Context and word of each n-gram as one number; the order of n-grams is the order of these numbers."""
    keys = np.repeat(places, np.diff(above.starts)).astype(np.int64)
    keys <<= bits
    keys |= level.words
    return keys


def _ends(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    ends = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=ends[:-1])
    return ends


def _level(above: Level, keys: NDArray[np.int64], counts: Ints, bits: int) -> Level:
    """The level of these keys; `above` learns where its continuations start."""
    sizes = np.bincount(keys >> bits, minlength=len(above))
    above.starts = narrow(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]))
    return Level((keys & ((1 << bits) - 1)).astype(np.int32), counts, np.empty(0, dtype=np.int32))
