"""Correct answers to the exercise bpe_merges in other manners."""

# mypy: ignore-errors
from collections import Counter


def strings(words, count):
    corpus = {tuple(word): n for word, n in words.items()}
    found = []
    for _ in range(count):
        pairs = Counter()
        for pieces, n in corpus.items():
            for pair in zip(pieces, pieces[1:], strict=False):
                pairs[pair] += n
        if not pairs:
            break
        best = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[0][0]
        found.append(best)
        updated = {}
        for pieces, n in corpus.items():
            out, i = [], 0
            while i < len(pieces):
                if pieces[i : i + 2] == best:
                    out.append(best[0] + best[1])
                    i += 2
                else:
                    out.append(pieces[i])
                    i += 1
            updated[tuple(out)] = updated.get(tuple(out), 0) + n
        corpus = updated
    return found


def lists_of_pairs(words, count):
    corpus, found = [[list(word), n] for word, n in words.items()], []
    while len(found) < count:
        pairs = {}
        for pieces, n in corpus:
            for i in range(len(pieces) - 1):
                key = (pieces[i], pieces[i + 1])
                pairs[key] = pairs.get(key, 0) + n
        if not pairs:
            return [list(pair) for pair in found]
        top = max(pairs.values())
        found.append(min(key for key, n in pairs.items() if n == top))
        for entry in corpus:
            out = []
            for piece in entry[0]:
                if out and not isinstance(out[-1], tuple) and (out[-1], piece) == found[-1]:
                    out[-1] = (out[-1] + piece,)  # marked, so that it is not joined again
                else:
                    out.append(piece)
            entry[0] = [each[0] if isinstance(each, tuple) else each for each in out]
    return [list(pair) for pair in found]


def recursive(words, count):
    def join(pieces, pair):
        if len(pieces) < 2:
            return pieces
        if (pieces[0], pieces[1]) == pair:
            return (pieces[0] + pieces[1], *join(pieces[2:], pair))
        return (pieces[0], *join(pieces[1:], pair))

    def step(corpus, left):
        pairs = Counter()
        for pieces, n in corpus:
            pairs.update(dict.fromkeys(zip(pieces, pieces[1:], strict=False), 0))
            for pair in zip(pieces, pieces[1:], strict=False):
                pairs[pair] += n
        if not left or not pairs:
            return []
        best = min(pairs, key=lambda pair: (-pairs[pair], *pair))
        return [best, *step([(join(pieces, best), n) for pieces, n in corpus], left - 1)]

    return step([(tuple(word), n) for word, n in words.items()], count)
