"""From counts to probabilities: what each way of smoothing makes of a trie of n-grams.

Every way ends in the same two tables, so that scoring is the same for all. An n-gram (c, w) that was seen has its
log p(w | c). A context c has the log of a factor: a word w not seen after c has p(w | c) = factor(c) · p(w | c'),
where c' is c without its first word; a context that was never continued has factor 1. For add-k, c' is no context at
all: what was not seen after c shares evenly, so the factor applies to 1/V.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.models.ngram_counts import Ints, Level, Trie, find
from weft.models.smoothing import AddK, KneserNey, MaximumLikelihood, ModifiedKneserNey, Smoothing, StupidBackoff

BLOCK = 1 << 20  # n-grams worked on together: tens of MB in float64
FALLBACK_DISCOUNT = 0.5  # where no n-gram occurs once, or none twice, and n₁/(n₁ + 2n₂) is undefined or 0

Floats = NDArray[np.float32]
Discounts = tuple[float, float, float]  # of n-grams that count one, two, and three or more
Tick = Callable[[int], None]


@dataclass
class Weights:
    """The log-probabilities of one level's n-grams, and the log-factors of the same n-grams as contexts."""

    log_prob: Floats  # (n-grams,)
    backoff: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))  # empty at the highest order


def smooth(trie: Trie, smoothing: Smoothing, openings: list[Ints], tick: Tick) -> list[Weights]:
    """The weights of every level. `openings[n − 1]` are the places of the n-grams that some document begins with."""
    match smoothing:
        case MaximumLikelihood():
            return _add_k(trie, 0.0, tick)
        case AddK():
            return _add_k(trie, smoothing.k, tick)
        case StupidBackoff():
            return _stupid_backoff(trie, smoothing.alpha, tick)
        case KneserNey() | ModifiedKneserNey():
            return _kneser_ney(trie, partial(discounts, smoothing), openings, tick)


def discounts(smoothing: KneserNey | ModifiedKneserNey, adjusted: Ints) -> Discounts:
    """What Kneser–Ney takes from n-grams of one length, from the adjusted counts of all of them."""
    if isinstance(smoothing, ModifiedKneserNey):
        return _three_discounts(adjusted)
    one = _discount(adjusted) if smoothing.discount is None else smoothing.discount
    return one, one, one


def _sum_continuations(level: Level, values: Ints) -> Ints:
    """For each n-gram of `level`, the sum of `values` over its continuations in the next."""
    sums: Ints = np.zeros(len(values) + 1, dtype=np.int32 if values.sum() < 2**31 else np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[level.starts[1:]] - sums[level.starts[:-1]]


def _blocks(above: Level, level: Level, tick: Tick | None = None) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """The n-grams of `level`, some at a time, and the places of their contexts in `above`."""
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
    """p(w | c) = (count(c, w) + k) / (count(c) + kV). With k = 0 nothing is left for words not seen after c."""
    vocab_size = len(trie[0])
    total = trie[0].counts.sum() + k * vocab_size
    weights = [Weights(_log((trie[0].counts + k) / total))]
    for above, level in pairwise(trie):
        totals = _sum_continuations(above, level.counts) + k * vocab_size
        left = np.divide(k * vocab_size, totals, out=np.ones(len(totals)), where=totals > 0)
        weights[-1].backoff = _log(left)
        log_prob = np.empty(len(level), dtype=np.float32)
        for part, context in _blocks(above, level, tick):
            log_prob[part] = np.log((level.counts[part] + k) / totals[context])
        weights.append(Weights(log_prob))
    return weights


def _stupid_backoff(trie: Trie, alpha: float, tick: Tick) -> list[Weights]:
    """Brants et al. 2007, §4: S(w | c) = count(c, w)/count(c), or α S(w | c') if that is zero; then p = S / Z.

    The scores of one context do not sum to one. Their sum follows from the shorter context's,
    Z(c) = 1 + α (Z(c') − Σ S(w | c') over the words seen after c), so dividing by it costs nothing when scoring and
    makes decoding and perplexity proper. A word never seen at all is given one more step back, to α/V.
    """
    vocab_size = len(trie[0])
    counts = trie[0].counts
    scores = np.where(counts > 0, counts / counts.sum(), alpha / vocab_size)
    below = np.full(1, scores.sum())  # Z of each context one word shorter; first of the one that is empty
    weights = [Weights(np.log(scores / below).astype(np.float32))]
    score = scores.astype(np.float32)
    suffixes = np.zeros(vocab_size, dtype=np.int64)  # places of the n-grams without their first word
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
        shorter = below[suffixes]
        mass = 1.0 + alpha * np.maximum(shorter - covered, 0.0)
        weights[-1].backoff = np.where(totals > 0, np.log(alpha * shorter / mass), 0.0).astype(np.float32)
        log_prob = np.empty(len(level), dtype=np.float32)
        for part, context in _blocks(above, level, tick):
            log_prob[part] = np.log(here[part] / mass[context])
        weights.append(Weights(log_prob))
        below, score, suffixes = mass, here, longer
    return weights


def _kneser_ney(trie: Trie, discounts: Callable[[Ints], Discounts], openings: list[Ints], tick: Tick) -> list[Weights]:
    """Interpolated Kneser–Ney (Chen and Goodman 1999, §2.7): p(w | c) = (a(c, w) − D)⁺ / a(c) + γ(c) p(w | c').

    At the highest order a is the count. Below it, a is the number of different words seen before (c, w), where the
    beginning of a document counts as one such word. D is that of an n-gram with a = 1, a = 2 or more, from all a of its
    order. γ(c) is what the discounts take from c; the recursion ends in the uniform distribution, so that a word never
    seen keeps a probability.
    """
    vocab_size = len(trie[0])
    suffixes = np.zeros(vocab_size, dtype=np.int64)
    longer = _suffixes(trie, 0, suffixes)
    adjusted = _varieties(trie, 0, longer, openings)
    taken = _taken(adjusted, discounts(adjusted))
    total = adjusted.sum()
    prob = np.maximum(adjusted - taken, 0.0) / total + taken.sum() / total / vocab_size
    weights = [Weights(np.log(prob).astype(np.float32))]
    for n, (above, level) in enumerate(pairwise(trie), start=1):
        suffixes, longer = longer, _suffixes(trie, n, longer)
        adjusted = _varieties(trie, n, longer, openings)
        by_count = discounts(adjusted)
        totals = np.maximum(_sum_continuations(above, adjusted), 1)
        left = _left(above, adjusted, by_count) / totals  # γ(c)
        lower, log_prob = weights[-1], np.empty(len(level), dtype=np.float32)
        lower.backoff = np.log(np.where(left > 0, left, 1.0)).astype(np.float32)
        del left
        for part, context in _blocks(above, level, tick):
            own = np.maximum(adjusted[part] - _taken(adjusted[part], by_count), 0.0) / totals[context]
            passed = np.exp(lower.backoff[context].astype(np.float64) + lower.log_prob[suffixes[part]])
            log_prob[part] = np.log(own + passed)
        weights.append(Weights(log_prob))
    return weights


def _suffixes(trie: Trie, n: int, suffixes: Ints) -> Ints:
    """For each n-gram of level `n + 1`, the place in level `n` of what remains without its first word. `suffixes`: the
    same for level `n`. The highest order has no level after it: nothing."""
    if n + 1 == len(trie):
        return np.empty(0, dtype=np.int32)
    above, level = trie[n], trie[n + 1]
    if n == 0:
        return level.words
    places = np.empty(len(level), dtype=np.int32 if len(above) < 2**31 else np.int64)
    for part, context in _blocks(above, level):
        places[part] = find(trie[n - 1], above, suffixes[context], level.words[part])
    return places


def _varieties(trie: Trie, n: int, longer: Ints, openings: list[Ints]) -> Ints:
    """Kneser–Ney's adjusted counts of level `n`; `longer` are the suffixes of the level after it."""
    if n + 1 == len(trie):
        return trie[n].counts
    before = np.bincount(longer, minlength=len(trie[n]))
    before[openings[n]] += 1
    return before.astype(trie[n].counts.dtype)


def _taken(adjusted: Ints, discounts: Discounts) -> NDArray[np.float64]:
    return np.array([0.0, *discounts]).take(np.minimum(adjusted, 3))


def _left(above: Level, adjusted: Ints, discounts: Discounts) -> NDArray[np.float64]:
    """What the discounts take from each context of `above`; `adjusted` are the counts of its continuations."""
    one, two, more = discounts
    left = more * np.diff(above.starts)
    for times, discount in ((1, one), (2, two)):
        if discount != more:
            left += (discount - more) * _sum_continuations(above, (adjusted == times).astype(np.int8))
    return left


def _three_discounts(adjusted: Ints) -> Discounts:
    """D₁ = 1 − 2Y n₂/n₁, D₂ = 2 − 3Y n₃/n₂, D₃₊ = 3 − 4Y n₄/n₃ with Y = n₁/(n₁ + 2n₂) (Chen and Goodman 1999, eq. 26).
    One for all where the counts are too few to estimate three."""
    n1, n2, n3, n4 = (int(np.count_nonzero(adjusted == times)) for times in (1, 2, 3, 4))
    one = _discount(adjusted)
    if not (n1 and n2 and n3):
        return one, one, one
    found = 1 - 2 * one * n2 / n1, 2 - 3 * one * n3 / n2, 3 - 4 * one * n4 / n3
    return found if min(found) > 0 else (one, one, one)


def _discount(adjusted: Ints) -> float:
    """n₁ / (n₁ + 2n₂), from how many n-grams count one and two (Ney, Essen and Kneser 1994)."""
    once, twice = int(np.count_nonzero(adjusted == 1)), int(np.count_nonzero(adjusted == 2))
    return once / (once + 2 * twice) if once and twice else FALLBACK_DISCOUNT
