"""Lecture 3: the n-gram language model p(w_t | w_{t−N+1}, …, w_{t−1}), learned by counting. Standard library only.

    python lectures/ngram.py            what cows eat, as on the slide; then sentences of a small grammar about cows
    python lectures/ngram.py book.txt   your own text

Figure: on held-out sentences of the grammar the perplexity is 2.11 at N = 6; the grammar's is 1.96.
"""

import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Gram = tuple[str, ...]  # n words in a row
Die = Counter[str]  # "massive 50k-sided dice": how often each word w_t came next
Model = Callable[[str, Gram], float]  # p(w | h): a word, and the words before it

END, UNKNOWN = "</s>", "<unk>"


# ---- Learning: "just count n-gram frequencies"


def count(texts: list[Gram], n: int) -> Counter[Gram]:
    """c(w_{t−n+1} … w_t): the count of each sequence of n words within a text."""
    return Counter(text[t : t + n] for text in texts for t in range(len(text) - n + 1))


def dice(counts: Counter[Gram]) -> dict[Gram, Die]:
    """One die for each context h = (w_{t−n+1}, …, w_{t−1})."""
    table: defaultdict[Gram, Die] = defaultdict(Counter)
    for gram, c in counts.items():
        table[gram[:-1]][gram[-1]] = c
    return dict(table)


class MaximumLikelihood:
    """p(w | h) = c(h, w) / Σ_w' c(h, w'): an unseen word has probability zero."""

    def __init__(self, texts: list[Gram], N: int) -> None:
        self.N = N
        self.dice = [dice(count(texts, n)) for n in range(1, N + 1)]

    def p(self, w: str, h: Gram) -> float:
        h = h[max(0, len(h) - self.N + 1) :]  # the last N − 1 words; fewer at the beginning of a text
        while h not in self.dice[len(h)]:  # an unseen context: drop its first word
            h = h[1:]
        die = self.dice[len(h)][h]
        return die[w] / die.total()


# ---- Smoothing: interpolated Kneser–Ney (Chen and Goodman 1999)


def varieties(texts: list[Gram], n: int) -> Counter[Gram]:
    """The number of distinct words before each sequence of n words; the beginning of a text counts as a word.

    "Francisco" is frequent, but always follows "San", so in a new context it is unlikely.
    """
    return Counter(gram[1:] for gram in count([("", *text) for text in texts], n + 1))


def one_discount(counts: Counter[Gram]) -> list[float]:
    """D = n₁ / (n₁ + 2n₂), where n₁ n-grams occur once and n₂ twice. As a list: D for counts of 0, 1, 2, 3 or more."""
    n = Counter(counts.values())
    D = n[1] / (n[1] + 2 * n[2]) if n[1] and n[2] else 0.5
    return [0.0, D, D, D]


def three_discounts(counts: Counter[Gram]) -> list[float]:
    """Modified Kneser–Ney: D₁ = 1 − 2D n₂/n₁, D₂ = 2 − 3D n₃/n₂, D₃ = 3 − 4D n₄/n₃; a single D if n-grams are few."""
    n, one = Counter(counts.values()), one_discount(counts)
    if not (n[1] and n[2] and n[3]):
        return one
    three = [0.0, *(k - (k + 1) * one[1] * n[k + 1] / n[k] for k in (1, 2, 3))]
    return three if min(three[1:]) > 0 else one


class KneserNey:
    """p(w | h) = max(a(h, w) − D, 0) / a(h) + γ(h) p(w | h'), where h' is h without its first word.

    a is the count c for the longest n-grams, and the number of distinct preceding words for shorter ones. γ(h) is the
    total that D takes from h, so that p sums to one. The recursion ends in the uniform distribution 1/V.
    """

    def __init__(
        self, texts: list[Gram], N: int, V: int, discounts: Callable[[Counter[Gram]], list[float]] = one_discount
    ) -> None:
        self.N, self.V = N, V
        a = [varieties(texts, n) for n in range(1, N)] + [count(texts, N)]
        self.D = [discounts(counts) for counts in a]
        self.dice = [dice(counts) for counts in a]
        self.total = [{h: die.total() for h, die in level.items()} for level in self.dice]
        self.gamma = [
            {h: sum(D[min(c, 3)] for c in die.values()) / die.total() for h, die in level.items()}
            for level, D in zip(self.dice, self.D, strict=True)
        ]

    def p(self, w: str, h: Gram) -> float:
        h = h[max(0, len(h) - self.N + 1) :]
        p = 1 / self.V
        for n in range(len(h) + 1):  # from the empty context to the whole one
            context = h[len(h) - n :]
            if context in self.dice[n]:
                a = self.dice[n][context][w]
                p = max(a - self.D[n][min(a, 3)], 0) / self.total[n][context] + self.gamma[n][context] * p
        return p


# ---- Evaluation (lecture 5) and sampling (lecture 3)


def perplexity(probabilities: Iterable[float]) -> float:
    """exp(−1/n Σ log p(w_i | w_1, …, w_{i−1})): for 1/4, 1/3, 1/4, 1/3 it is 3.464."""
    logs = [math.log(p) if p > 0 else -math.inf for p in probabilities]
    return math.exp(-sum(logs) / len(logs))


def score(p: Model, text: Gram) -> Iterator[float]:
    """p(w_t | the words before it) of every word; no model here looks back more than eight words."""
    return (p(text[t], text[max(0, t - 8) : t]) for t in range(len(text)))


def sample(p: Model, vocabulary: list[str], rng: random.Random, length: int = 30) -> Gram:
    """Ancestral sampling: pick the die of the last words, roll it, write the word that lands face up, repeat."""
    words: Gram = (END,)
    while len(words) <= length:
        words += (rng.choices(vocabulary, [p(w, words) for w in vocabulary])[0],)
    return words


# ---- Training text: the lecture's cows, a grammar about them, or a book

SNIPPETS = """the cows eat grass / our cows eat hay daily / factory-farm cows eat corn / on an organic farm , cows eat
hay and / do your cows eat grass or corn ? / what do cows eat if they have / cows eat corn when there is no / which cows
eat which foods depends / if cows eat grass / when cows eat corn their stomachs / should we let cows eat corn ?"""

GRAMMAR = {
    "STATEMENT": ["WHOSE cows eat FOOD .", "WHOSE cows eat FOOD or FOOD .", "if WHOSE cows eat FOOD , they MOO ."],
    "QUESTION": ["do WHOSE cows eat FOOD ?", "should we let WHOSE cows eat FOOD ?", "do WHOSE cows eat FOOD or FOOD ?"],
    "TEXT": ["STATEMENT", "STATEMENT", "QUESTION"],
    "WHOSE": ["the", "our", "your", "their", "factory-farm"],
    "FOOD": ["corn"] * 4 + ["grass"] * 3 + ["hay"] * 2 + ["leaves", "FOOD and hay"],
    "MOO": ["moo", "sleep", "moo and sleep"],
}


def derive(symbol: str, rng: random.Random) -> tuple[list[str], float]:
    """Derive words from a symbol of the grammar; return them and their log p."""
    if symbol not in GRAMMAR:
        return [symbol], 0.0
    chosen = rng.choice(GRAMMAR[symbol])
    parts = [derive(part, rng) for part in chosen.split()]
    here = math.log(GRAMMAR[symbol].count(chosen) / len(GRAMMAR[symbol]))
    return [word for words, _ in parts for word in words], here + sum(log_p for _, log_p in parts)


def learn(text: Gram, longest: int) -> None:
    """Train on nine tenths of a text, measure perplexity on the rest, and generate a sample."""
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    vocabulary = sorted({*train, UNKNOWN})
    known = set(vocabulary)
    held_out = tuple(w if w in known else UNKNOWN for w in held_out)
    print(f"{len(train):,} words, {len(vocabulary):,} distinct; perplexity on {len(held_out):,} held-out words:")
    for N in range(1, longest + 1):
        model = KneserNey([train], N, len(vocabulary))
        raw = perplexity(score(MaximumLikelihood([train], N).p, held_out))
        print(f"N = {N}: {raw:7.2f} from counts alone, {perplexity(score(model.p, held_out)):7.2f} with Kneser–Ney")
    print(" ".join(sample(model.p, vocabulary, random.Random(1))[1:]).replace(END, "\n"))


def main() -> None:
    if len(sys.argv) > 1:
        try:
            lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            print(f"ngram.py: {sys.argv[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            sys.exit(2)
        text = tuple(w for line in lines if line.strip() for w in (*re.findall(r"[\w'’]+|[^\w\s]", line), END))
        if len(text) < 100:
            print(f"ngram.py: {sys.argv[1]}: {len(text)} words; at least 100 are needed", file=sys.stderr)
            sys.exit(2)
        learn(text, 4)
        return
    cows = MaximumLikelihood([tuple(snippet.split()) for snippet in SNIPPETS.split(" / ")], 3)
    for w, c in cows.dice[2]["cows", "eat"].most_common():
        print(f"p({w} | cows, eat) = {c}/11 = {cows.p(w, ('cows', 'eat')):.3f}")
    rng = random.Random(0)
    sentences = [derive("TEXT", rng) for _ in range(4000)]
    learn(tuple(w for words, _ in sentences for w in (*words, END)), 6)
    mean = sum(log_p for _, log_p in sentences) / sum(len(words) + 1 for words, _ in sentences)
    print(f"the grammar's perplexity: {math.exp(-mean):.2f}")


if __name__ == "__main__":
    main()
