"""Smoothing: from a trie of n-gram counts to probabilities.

All methods produce the same two tables, so that scoring does not depend on the method. A seen n-gram (c, w) has its
log p(w | c). A context c has a log backoff factor: a word w not seen after c has p(w | c) = factor(c) · p(w | c'),
where c' is c without its first word. The factor is 1 for a context that was never continued. With add-k, all words not
seen after c have the same probability, so the factor applies to 1/V.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.models.ngram_counts import Ints, Trie, TrieLevel, find
from weft.models.smoothing import AddK, KneserNey, MaximumLikelihood, ModifiedKneserNey, Smoothing, StupidBackoff

BLOCK = 1 << 20  # n-grams processed at a time: tens of MB in float64
FALLBACK_DISCOUNT = 0.5  # if no n-gram occurs once, or none twice, so that n₁/(n₁ + 2n₂) is undefined or 0

Floats = NDArray[np.float32]
Discounts = tuple[float, float, float]  # for counts of one, two, and three or more
Tick = Callable[[int], None]


@dataclass
class Weights:
    """Log-probabilities of the n-grams of a level, and their log backoff factors as contexts."""

    log_prob: Floats  # (n-grams,)
    backoff: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))  # empty at the highest order


def smooth(trie: Trie, smoothing: Smoothing, openings: list[Ints], *, tick: Tick) -> list[Weights]:
    """Weights of every level. `openings[n − 1]` are the indices of the n-grams at the beginning of a document."""
    match smoothing:
        case MaximumLikelihood():
            return _add_k(trie, 0.0, tick)
        case AddK():
            return _add_k(trie, smoothing.k, tick)
        case StupidBackoff():
            return _stupid_backoff(trie, smoothing.alpha, tick)
        case KneserNey() | ModifiedKneserNey():
            return _kneser_ney(trie, partial(discounts, smoothing), openings, tick=tick)


def discounts(smoothing: KneserNey | ModifiedKneserNey, adjusted: Ints) -> Discounts:
    """Kneser–Ney discounts of one order, estimated from all its adjusted counts.

    Y = n₁/(n₁ + 2n₂), from the numbers of n-grams that occur once and twice (Ney, Essen and Kneser 1994). The modified
    discounts are D₁ = 1 − 2Y n₂/n₁, D₂ = 2 − 3Y n₃/n₂ and D₃₊ = 3 − 4Y n₄/n₃ (Chen and Goodman 1999, eq. 26), or three
    times Y if there are too few counts to estimate them.
    """
    if isinstance(smoothing, KneserNey) and smoothing.discount is not None:
        return (smoothing.discount,) * 3
    n1, n2, n3, n4 = (int(np.count_nonzero(adjusted == times)) for times in (1, 2, 3, 4))
    one = n1 / (n1 + 2 * n2) if n1 and n2 else FALLBACK_DISCOUNT
    if isinstance(smoothing, ModifiedKneserNey) and n1 and n2 and n3:
        three = 1 - 2 * one * n2 / n1, 2 - 3 * one * n3 / n2, 3 - 4 * one * n4 / n3
        return three if min(three) > 0 else (one, one, one)
    return one, one, one


def _sum_continuations(level: TrieLevel, values: Ints) -> Ints:
    """Sum of `values` over the continuations of each n-gram of `level`."""
    sums: Ints = np.zeros(len(values) + 1, dtype=np.int32 if values.sum() < 2**31 else np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[level.starts[1:]] - sums[level.starts[:-1]]


def _blocks(above: TrieLevel, level: TrieLevel, tick: Tick | None = None) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Yield slices of `level` in blocks, with the indices of the n-grams' contexts in `above`."""
    for low in range(0, len(level), BLOCK):
        high = min(low + BLOCK, len(level))
        first = int(np.searchsorted(above.starts, low, side="right")) - 1
        last = int(np.searchsorted(above.starts, high, side="left"))
        edges = np.clip(above.starts[first : last + 1], low, high)
        yield slice(low, high), np.repeat(np.arange(first, last), np.diff(edges))
        if tick is not None:
            tick(high - low)


def _log(values: NDArray[np.float64]) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(values).astype(np.float32)


def _add_k(trie: Trie, k: float, tick: Tick) -> list[Weights]:
    """p(w | c) = (count(c, w) + k) / (count(c) + kV); with k = 0, words not seen after c have probability 0."""
    vocab_size = len(trie[0])
    total = trie[0].counts.sum() + k * vocab_size
    weights = [Weights(_log((trie[0].counts + k) / total))]
    for above, level in pairwise(trie):
        totals = _sum_continuations(above, level.counts) + k * vocab_size
        unseen = np.divide(k * vocab_size, totals, out=np.ones(len(totals)), where=totals > 0)
        weights[-1].backoff = _log(unseen)
        log_prob = np.empty(len(level), dtype=np.float32)
        for part, context in _blocks(above, level, tick):
            log_prob[part] = np.log((level.counts[part] + k) / totals[context])
        weights.append(Weights(log_prob))
    return weights


def _stupid_backoff(trie: Trie, alpha: float, tick: Tick) -> list[Weights]:
    """Brants et al. 2007, §4: S(w | c) = count(c, w)/count(c), or α S(w | c') if that is zero; then p = S / Z.

    The scores of a context do not sum to one. Their sum follows from that of the shorter context,
    Z(c) = 1 + α (Z(c') − Σ S(w | c') over the words seen after c), so normalising costs nothing when scoring, and gives
    valid perplexities. A word that was never seen has one more backoff, to α/V.
    """
    vocab_size = len(trie[0])
    counts = trie[0].counts
    scores = np.where(counts > 0, counts / counts.sum(), alpha / vocab_size)
    shorter_mass = np.full(1, scores.sum())  # Z of the contexts one word shorter, at first the empty one
    weights = [Weights(np.log(scores / shorter_mass).astype(np.float32))]
    score = scores.astype(np.float32)
    suffixes = np.zeros(vocab_size, dtype=np.int64)  # indices of the n-grams without their first word
    for n, (above, level) in enumerate(pairwise(trie)):
        longer = _suffixes(trie, n, suffixes)
        totals = _sum_continuations(above, level.counts)
        covered = np.zeros(len(above))
        here = np.empty(len(level), dtype=np.float32)
        for part, context in _blocks(above, level):
            here[part] = level.counts[part] / totals[context]
            first = int(context[0])
            sums = np.bincount(context - first, weights=score[longer[part]])
            covered[first : first + len(sums)] += sums
        shorter = shorter_mass[suffixes]
        mass = 1.0 + alpha * np.maximum(shorter - covered, 0.0)
        weights[-1].backoff = np.where(totals > 0, np.log(alpha * shorter / mass), 0.0).astype(np.float32)
        log_prob = np.empty(len(level), dtype=np.float32)
        for part, context in _blocks(above, level, tick):
            log_prob[part] = np.log(here[part] / mass[context])
        weights.append(Weights(log_prob))
        shorter_mass, score, suffixes = mass, here, longer
    return weights


def _kneser_ney(
    trie: Trie, discounts: Callable[[Ints], Discounts], openings: list[Ints], *, tick: Tick
) -> list[Weights]:
    """Interpolated Kneser–Ney (Chen and Goodman 1999, §2.7): p(w | c) = (a(c, w) − D)⁺ / a(c) + γ(c) p(w | c').

    At the highest order, a is the count. Below it, a is the number of distinct words seen before (c, w), and the
    beginning of a document counts as a word. D depends on a and is estimated for each order. γ(c) is the mass that the
    discounts take from c. The recursion ends in the uniform distribution, so that unseen words have a probability.
    """
    vocab_size = len(trie[0])
    suffixes = np.zeros(vocab_size, dtype=np.int64)
    longer = _suffixes(trie, 0, suffixes)
    adjusted = _adjusted_counts(trie, 0, longer, openings=openings)
    discounted = _discounts_of(adjusted, discounts(adjusted))
    total = adjusted.sum()
    prob = np.maximum(adjusted - discounted, 0.0) / total + discounted.sum() / total / vocab_size
    weights = [Weights(np.log(prob).astype(np.float32))]
    for n, (above, level) in enumerate(pairwise(trie), start=1):
        suffixes, longer = longer, _suffixes(trie, n, longer)
        adjusted = _adjusted_counts(trie, n, longer, openings=openings)
        by_count = discounts(adjusted)
        totals = np.maximum(_sum_continuations(above, adjusted), 1)
        gamma = _discounted_mass(above, adjusted, by_count) / totals
        lower, log_prob = weights[-1], np.empty(len(level), dtype=np.float32)
        lower.backoff = np.log(np.where(gamma > 0, gamma, 1.0)).astype(np.float32)
        del gamma
        for part, context in _blocks(above, level, tick):
            seen = np.maximum(adjusted[part] - _discounts_of(adjusted[part], by_count), 0.0) / totals[context]
            backed_off = np.exp(lower.backoff[context].astype(np.float64) + lower.log_prob[suffixes[part]])
            log_prob[part] = np.log(seen + backed_off)
        weights.append(Weights(log_prob))
    return weights


def _suffixes(trie: Trie, n: int, suffixes: Ints) -> Ints:
    """Index in level `n` of each n-gram of level `n + 1` without its first word; `suffixes` are those of level `n`.
    Empty if level `n` is the highest order."""
    if n + 1 == len(trie):
        return np.empty(0, dtype=np.int32)
    above, level = trie[n], trie[n + 1]
    if n == 0:
        return level.words
    indices = np.empty(len(level), dtype=np.int32 if len(above) < 2**31 else np.int64)
    for part, context in _blocks(above, level):
        indices[part] = find(trie[n - 1], above, suffixes[context], words=level.words[part])
    return indices


def _adjusted_counts(trie: Trie, n: int, longer: Ints, *, openings: list[Ints]) -> Ints:
    """Kneser–Ney's adjusted counts of level `n`; `longer` are the suffixes of the next level."""
    if n + 1 == len(trie):
        return trie[n].counts
    before = np.bincount(longer, minlength=len(trie[n]))
    before[openings[n]] += 1
    return before.astype(trie[n].counts.dtype)


def _discounts_of(adjusted: Ints, discounts: Discounts) -> NDArray[np.float64]:
    return np.array([0.0, *discounts]).take(np.minimum(adjusted, 3))


def _discounted_mass(above: TrieLevel, adjusted: Ints, discounts: Discounts) -> NDArray[np.float64]:
    """Sum of the discounts over the continuations of each context of `above`, whose counts are `adjusted`."""
    one, two, three = discounts
    mass = three * np.diff(above.starts)
    for times, discount in ((1, one), (2, two)):
        if discount != three:
            mass += (discount - three) * _sum_continuations(above, (adjusted == times).astype(np.int8))
    return mass
