"""Counts of n-grams as a trie of sorted arrays, built from a long token array in bounded memory.

Level n holds the distinct n-grams in lexicographic order, so that the n-grams with a common context are adjacent, from
an index that the context stores in level n − 1. An n-gram takes 4 bytes for its last word, 4 for its count and, below
the highest order, 4 for the index of its first continuation.

The first token of a document has no context, the second has one word, and so on: no n-gram crosses a document boundary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.models.base import check_range

Array = NDArray[Any]
Ints = NDArray[Any]  # int32 or int64

BLOCK = 1 << 16  # queries per block of a lookup: they stay in a core's cache
CHUNK = 1 << 25  # tokens counted at a time: 8 bytes each while they are sorted
MAX_TRIES = 4  # tries of chunks held before they are merged


@dataclass
class TrieLevel:
    """Distinct n-grams of one length; n-gram i is continued by [starts[i], starts[i + 1]) of the next level."""

    words: Ints  # (n-grams,) last word of each
    counts: Ints  # (n-grams,)
    starts: Ints  # (n-grams + 1,) indices in the next level; empty at the highest order

    def __len__(self) -> int:
        return len(self.words)


Trie = list[TrieLevel]


def narrow(values: Ints) -> Ints:
    """Convert to int32, or to int64 if a value needs it."""
    small = not len(values) or int(values.max()) < 2**31
    return values.astype(np.int32 if small else np.int64, copy=False)


class Documents(NamedTuple):
    """tokens (time,), possibly memory-mapped, and the ascending indices where documents begin."""

    tokens: Ints
    starts: NDArray[np.int64]

    def part(self, low: int, high: int) -> "Documents":
        """Tokens [low, high), and the starts of documents among them."""
        tokens = np.asarray(self.tokens[low:high])
        first, last = np.searchsorted(self.starts, [low, low + len(tokens)])
        return Documents(tokens, self.starts[first:last] - low)


def document_starts(tokens: int, boundaries: Array | None) -> NDArray[np.int64]:
    """Starts of documents, including 0, from ascending offsets that may include 0 and the end."""
    offsets = np.asarray([] if boundaries is None else boundaries, dtype=np.int64)
    assert bool((np.diff(offsets, prepend=0, append=tokens) >= 0).all()), "boundaries must ascend from 0 to the end"
    return np.unique(np.append(0, offsets[offsets < tokens]))


def find(above: TrieLevel, level: TrieLevel, parents: Ints, *, words: Ints) -> NDArray[np.int64]:
    """Indices in `level` of the n-grams of a context, by its index in `above`, and a word; −1 where unseen.

    A parent of −1 is an unseen context. Each query is a binary search in its context's continuations. The queries of a
    block run in lockstep, sorted by the number of steps they need, so that finished ones drop off the end.
    """
    found = np.full(len(parents), -1, dtype=np.int64)
    if not len(level):
        return found
    probe, half = np.empty(BLOCK, dtype=np.int64), np.empty(BLOCK, dtype=np.int64)
    for low in range(0, len(parents), BLOCK):
        queries = np.flatnonzero(parents[low : low + BLOCK] >= 0)
        contexts = parents[low : low + BLOCK].take(queries)
        begin = above.starts.take(contexts)
        size = above.starts.take(contexts + 1) - begin
        steps = np.frexp((size - 1).clip(0).astype(np.float32))[1].astype(np.uint8)  # ⌈log₂ size⌉
        order = np.argsort(steps, kind="stable")[::-1]
        queries, size = queries.take(order), size.take(order).astype(np.int64)
        index, has_continuations = begin.take(order).astype(np.int64), size > 0
        word = words[low : low + BLOCK].take(queries)
        index -= 1  # before the candidates: that word is smaller, or belongs to another context
        active = len(order)
        for finished in np.bincount(steps)[:-1]:
            active -= int(finished)
            np.right_shift(size[:active], 1, out=half[:active])
            np.add(index[:active], half[:active], out=probe[:active])
            smaller = level.words.take(probe[:active], mode="clip") < word[:active]
            np.multiply(half[:active], smaller, out=probe[:active])
            index[:active] += probe[:active]
            size[:active] -= half[:active]
        index += 1
        hit = (level.words.take(index, mode="clip") == word) & has_continuations
        found[queries[hit] + low] = index[hit]
    return found


def lookups(trie: Trie, documents: Documents) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield for n = 1, 2, … the indices of each token's n-gram and of its context; −1 where unseen or none."""
    tokens, starts = documents
    here, words = tokens.astype(np.int64), tokens.astype(np.int32)
    contexts = np.full(len(tokens), -1, dtype=np.int64)
    yield here, contexts
    for above, level in pairwise(trie):
        contexts[1:] = here[:-1]
        contexts[starts] = -1
        # an n-gram is unseen if its last n − 1 words are
        here = find(above, level, np.where(here >= 0, contexts, -1), words=words)
        yield here, contexts


def count_ngrams(
    documents: Documents, vocab_size: int, order: int, *, tick: Callable[[int], None], chunk: int = CHUNK
) -> Trie:
    """Count the n-grams of up to `order` words, none of them across a document boundary.

    Chunks are counted one by one and merged a few at a time, so memory is bounded by the result and a few chunks.
    `tick` gets the number of tokens counted, once for each length.
    """
    tries: list[Trie] = []
    for low in range(0, len(documents.tokens), chunk):
        # words before the chunk are context of its first n-grams, but were counted in the previous chunk
        context = min(low, order - 1)
        part = documents.part(low - context, low + chunk)
        check_ids(part.tokens[context:], vocab_size)
        tries.append(_count_chunk(part, vocab_size, order, context=context, tick=tick))
        if len(tries) == MAX_TRIES:
            tries = [merge(tries)]
    return merge(tries)


def check_ids(tokens: Array, vocab_size: int) -> None:
    assert tokens.ndim == 1 and tokens.dtype.kind in "iu", "tokens must be a one-dimensional integer array"
    if len(tokens):
        check_range(int(tokens.min()), int(tokens.max()), vocab_size)


def _count_chunk(
    documents: Documents, vocab_size: int, order: int, *, context: int, tick: Callable[[int], None]
) -> Trie:
    """Count the n-grams of a chunk whose first `context` tokens were counted before."""
    tokens, starts = documents.tokens.astype(np.int32), documents.starts
    counts = np.bincount(tokens[context:], minlength=vocab_size)
    trie = [TrieLevel(np.arange(vocab_size, dtype=np.int32), narrow(counts), np.empty(0, dtype=np.int32))]
    tick(len(tokens) - context)
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
        above, level = trie[-1], _level(trie[-1], keys, narrow(np.diff(last, prepend=-1)), bits=bits)
        trie.append(level)
        counted_before = find(above, level, contexts[:context], words=tokens[:context])
        np.subtract.at(level.counts, counted_before[counted_before >= 0], 1)
        if n < order:
            here = narrow(find(above, level, contexts, words=tokens))
        tick(len(tokens) - context)
    return trie


def merge(tries: list[Trie]) -> Trie:
    """Merge tries into one with their total counts. Each level of the inputs is freed once it is merged."""
    if len(tries) == 1:
        return tries[0]
    bits = word_bits(len(tries[0][0]))
    empty = TrieLevel(*(np.empty(0, dtype=np.int32) for _ in range(3)))
    unigrams = np.asarray(np.sum([trie[0].counts for trie in tries], axis=0, dtype=np.int64))
    merged = [TrieLevel(tries[0][0].words, narrow(unigrams), np.empty(0, dtype=np.int32))]
    indices: list[Ints] = [tries[0][0].words for _ in tries]  # of each trie's n-grams in the merged level
    for n in range(1, len(tries[0])):
        keys = np.empty(sum(len(trie[n]) for trie in tries), dtype=np.int64)
        ends = np.cumsum([len(trie[n]) for trie in tries])
        for i, trie in enumerate(tries):
            keys[ends[i] - len(trie[n]) : ends[i]] = _keys(trie[n - 1], trie[n], indices[i], bits=bits)
        keys.sort()
        keys = keys[_ends(keys)]
        counts = np.zeros(len(keys), dtype=np.int64)
        for i, trie in enumerate(tries):
            indices[i] = narrow(np.searchsorted(keys, _keys(trie[n - 1], trie[n], indices[i], bits=bits)))
            counts[indices[i]] += trie[n].counts
            trie[n - 1] = empty
        merged.append(_level(merged[-1], keys, narrow(counts), bits=bits))
    return merged


def word_bits(vocab_size: int) -> int:
    """Number of bits of a word in a 64-bit key; the others hold its context's index."""
    return max(1, (vocab_size - 1).bit_length())


def _keys(above: TrieLevel, level: TrieLevel, indices: Ints, *, bits: int) -> NDArray[np.int64]:
    """Keys of context index and word, which sort like the n-grams."""
    keys = np.repeat(indices, np.diff(above.starts)).astype(np.int64)
    keys <<= bits
    keys |= level.words
    return keys


def _ends(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of the sorted keys is the last of its value."""
    ends = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=ends[:-1])
    return ends


def _level(above: TrieLevel, keys: NDArray[np.int64], counts: Ints, *, bits: int) -> TrieLevel:
    """Level of these keys; sets the `starts` of the level above."""
    sizes = np.bincount(keys >> bits, minlength=len(above))
    above.starts = narrow(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]))
    return TrieLevel((keys & ((1 << bits) - 1)).astype(np.int32), counts, np.empty(0, dtype=np.int32))
