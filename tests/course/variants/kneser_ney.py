"""Correct answers to the exercise kneser_ney in other manners."""

# mypy: ignore-errors
from collections import Counter, defaultdict
from itertools import pairwise


def counters(words, v, w, D):
    pairs = Counter(pairwise(words))
    after, before = defaultdict(set), defaultdict(set)
    for a, b in pairs:
        after[a].add(b)
        before[b].add(a)
    lower = len(before[w]) / len(pairs)
    total = sum(n for (a, _), n in pairs.items() if a == v)
    if total == 0:
        return lower
    gamma = D * len(after[v]) / total
    return max(pairs[v, w] - D, 0) / total + gamma * lower


def as_ngram_file(words, v, w, D):
    bigrams = list(zip(words, words[1:], strict=False))
    distinct = set(bigrams)
    low = sum(b == w for _, b in distinct) / len(distinct)
    from_v = [b for a, b in bigrams if a == v]
    if not from_v:
        return low
    seen = max(from_v.count(w) - D, 0.0)
    return (seen + D * len(set(from_v)) * low) / len(from_v)


def table(words, v, w, D):
    vocabulary = sorted(set(words) | {v, w})
    c = {a: dict.fromkeys(vocabulary, 0) for a in vocabulary}
    for i in range(1, len(words)):
        c[words[i - 1]][words[i]] += 1
    kinds = sum(n > 0 for row in c.values() for n in row.values())
    low = sum(c[a][w] > 0 for a in vocabulary) / kinds
    n = sum(c[v].values())
    taken = sum(min(D, x) for x in c[v].values())
    return (max(c[v][w] - D, 0) + taken * low) / n if n else low
