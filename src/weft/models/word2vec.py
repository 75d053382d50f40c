"""word2vec: vectors of words that predict their neighbours (Mikolov et al. 2013).

Skip-gram with negative sampling minimises −log σ(c·v) − Σ log σ(−n·v), for the vector v of a word near the predicted
word, that word's context vector c, and the context vectors n of random words drawn by frequency^0.75. CBOW predicts
the word from the mean of all vectors around it. Frequent words are left out at random, and each window has a random
reach, so that near words count more. Details that the papers leave open are those of the authors' code.
"""

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError, counted
from weft.models.config import Word2Vec
from weft.models.word_kernels import MEASURED, Floats, Word2VecCall, padded, train_chunks
from weft.progress import Advance

MAX_CHUNK, MIN_CHUNK = 10_000, 500  # tokens that are trained on in order by one thread; windows end at a chunk's ends
CHUNKS = 64  # of a short text
POWER = 0.75  # of a word's frequency, when negative samples are drawn (§2.2)
BITS = (1 << 64) - 1
MIN_WORDS = 20  # of a text; fewer have hardly a word that occurs in two places

Words = NDArray[np.int32]


class Word2VecTraining:
    """Tables of a word2vec model in training, and the text: word ids (time,), with −1 between documents."""

    def __init__(self, settings: Word2Vec, text: Words, *, epochs: int, seed: int):
        self.settings, self.text, self.epochs, self.seed = settings, text, epochs, seed
        counts = word_counts(text, settings.vocab_size)
        V, D = settings.vocab_size, settings.d_model
        self.embedding, self.context = padded(V, D), padded(V, D)
        self.embedding[:, :D] = (np.random.default_rng(seed).random((V, D), dtype=np.float32) - 0.5) / D
        self.embedding[counts == 0] = 0  # special tokens, and words that only occur elsewhere
        self.keep = keep_thresholds(counts, settings.subsample)
        self.threshold, self.alias = alias_table(counts**POWER)
        self.chunk = min(MAX_CHUNK, max(MIN_CHUNK, len(text) // CHUNKS))
        self.chunks = -(-len(text) // self.chunk)

    @property
    def vectors(self) -> Floats:
        """Vectors (vocab_size, d_model)."""
        return self.embedding[:, : self.settings.d_model]

    @property
    def state(self) -> dict[str, Floats]:
        """Tables that training resumes from."""
        return {"embedding": self.embedding, "context": self.context}

    def epoch(self, number: int, *, threads: int, tick: Advance) -> float:
        """Train on the whole text once, as epoch `number` from 0; return the mean loss of a prediction."""
        settings = self.settings
        rates = [settings.lr + (settings.min_lr - settings.lr) * n / self.epochs for n in (number, number + 1)]
        call = Word2VecCall(
            count=len(self.text),
            seed=(self.seed * 0x9E3779B97F4A7C15 + number) & BITS,
            vocab_size=settings.vocab_size,
            width=self.embedding.shape[1],
            window=settings.window,
            negatives=settings.negatives,
            cbow=settings.architecture == "cbow",
            chunk=self.chunk,
            lr_start=rates[0],
            lr_end=rates[1],
        )
        arrays = {"tokens": self.text, "keep": self.keep, "threshold": self.threshold, "alias": self.alias}

        def reference(chunk: int, loss: NDArray[np.float64]) -> None:
            self._train_chunk(chunk, call, loss)

        pointers = {**arrays, "embedding": self.embedding, "context": self.context}
        return train_chunks(call, pointers, self.chunks, reference=reference, threads=threads, tick=tick)

    def _train_chunk(self, chunk: int, call: Word2VecCall, loss: NDArray[np.float64]) -> None:
        """Train on one chunk as the C code does, update for update."""
        rng = RandomBits(call.seed, chunk)
        begin = chunk * self.chunk
        tokens = self.text[begin : begin + self.chunk].tolist()
        words = [word for word in tokens if word < 0 or rng.draw() >> 32 <= self.keep[word]]
        lr = call.lr_start + (call.lr_end - call.lr_start) * begin / len(self.text)
        for centre, word in enumerate(words):
            if word < 0:
                continue
            reach = 1 + (rng.draw() >> 32) % self.settings.window
            low, high = centre, centre + 1
            while low > max(0, centre - reach) and words[low - 1] >= 0:
                low -= 1
            while high < len(words) and high <= centre + reach and words[high] >= 0:
                high += 1
            around = words[low:centre] + words[centre + 1 : high]
            groups = [around] if call.cbow and around else [[other] for other in around]
            targets = [self._targets(word, rng) for _ in groups]
            for inputs, rows in zip(groups, targets, strict=True):
                cost = self._update(inputs, rows, lr)
                loss += (0.0, 0.0) if chunk % MEASURED else (cost, 1.0)

    def _targets(self, word: int, rng: "RandomBits") -> list[int]:
        """Return the word and its negative samples."""
        targets = [word]
        for _ in range(self.settings.negatives):
            bits = rng.draw()
            id = (bits >> 32) * self.settings.vocab_size >> 32
            id = int(self.alias[id]) if bits & 0xFFFFFFFF > self.threshold[id] else id
            targets += [id] if id != word else []
        return targets

    def _update(self, inputs: list[int], targets: list[int], lr: float) -> float:
        """Take a step of gradient descent on one prediction; return its loss."""
        hidden = self.embedding[inputs].mean(axis=0)
        scores = self.context[targets] @ hidden
        signs = np.where(np.arange(len(targets)) == 0, 1.0, -1.0)
        loss = np.log1p(np.exp(-signs * scores)).sum()
        scale = lr * ((signs > 0) - 1 / (1 + np.exp(-scores)))
        gradient = np.zeros_like(hidden)
        for target, factor in zip(targets, scale.astype(np.float32), strict=True):
            gradient += factor * self.context[target]
            self.context[target] += factor * hidden
        np.add.at(self.embedding, inputs, gradient)  # the whole gradient of the mean, as in the authors' code
        return float(loss)


class RandomBits:
    """Random 64-bit integers, the same as in C: xorshift64* (Vigna 2016), a stream for each chunk."""

    def __init__(self, seed: int, stream: int):
        z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & BITS
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS
        self.state = z ^ (z >> 31) or 1

    def draw(self) -> int:
        x = self.state
        x ^= x >> 12
        x ^= x << 25 & BITS
        x ^= x >> 27
        self.state = x
        return x * 0x2545F4914F6CDD1D & BITS


def word_counts(text: Words, vocab_size: int) -> NDArray[np.float64]:
    """Number of occurrences of each word, (vocab_size,); DataError if the text is too small to learn from."""
    counts = np.bincount(text[text >= 0], minlength=vocab_size).astype(np.float64)
    if np.count_nonzero(counts) < 2 or counts.sum() < MIN_WORDS:
        what = f"{counted(int(counts.sum()), 'word')} of the vocabulary, {np.count_nonzero(counts)} distinct"
        raise DataError(f"the text has {what}: too few to learn vectors from; add text, or lower tokenizer.min_count")
    return counts


def keep_thresholds(counts: NDArray[np.float64], subsample: float) -> NDArray[np.uint32]:
    """Probability of keeping each word, (√(f/t) + 1) · t/f for its frequency f and threshold t, in units of 2⁻³²."""
    ratio = np.maximum(counts, 1) / (subsample * counts.sum()) if subsample else np.zeros_like(counts)
    with np.errstate(divide="ignore"):
        kept = np.where(ratio > 0, (np.sqrt(ratio) + 1) / ratio, 1.0)
    return (np.minimum(kept, 1.0) * (2**32 - 1)).astype(np.uint32)


def alias_table(weights: NDArray[np.float64]) -> tuple[NDArray[np.uint32], Words]:
    """Thresholds and aliases (n,) to draw indices in proportion to their weights in constant time (Walker 1977)."""
    scaled = weights * (len(weights) / weights.sum())
    alias = np.arange(len(weights), dtype=np.int32)
    small, large = np.flatnonzero(scaled < 1).tolist(), np.flatnonzero(scaled >= 1).tolist()
    values = scaled.tolist()
    while small and large:
        low, high = small.pop(), large[-1]
        alias[low] = high
        values[high] -= 1 - values[low]
        if values[high] < 1:
            small.append(large.pop())
    rest = np.ones(len(weights))
    rest[alias != np.arange(len(weights))] = np.array(values)[alias != np.arange(len(weights))]
    return (np.clip(rest, 0, 1) * (2**32 - 1)).astype(np.uint32), alias
