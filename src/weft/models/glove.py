"""GloVe: vectors whose products fit the logarithms of co-occurrence counts (Pennington et al. 2014).

The loss of a pair of words with count X is f(X) (w·c + b + b' − log X)²/2, f(X) = min(1, (X/x_max)^α). A count adds 1/k
for two words at a distance of k, up to the window. The final vectors are the sums w + c. Updates are AdaGrad's, as in
the authors' code: the learning rate is part of the squared steps, and their sums begin at 1.
"""

import numpy as np
from numpy.typing import NDArray

from weft.models.config import GloVe
from weft.models.word2vec import Words, word_counts
from weft.models.word_kernels import PAIRS, Floats, GloVeCall, padded, train_chunks
from weft.progress import Advance, bar

CLIP = 100.0  # bound of a gradient
COUNTED = 1 << 24  # pairs that are sorted at a time, counted with multiplicity

Keys = NDArray[np.int64]
Counts = NDArray[np.float64]


class GloVeTraining:
    """Tables of a GloVe model in training, and the co-occurrence counts of the text (see `Word2VecTraining`)."""

    def __init__(self, settings: GloVe, text: Words, *, seed: int, progress: bool = False):
        occurrences = word_counts(text, settings.vocab_size)
        self.settings = settings
        V, D, rng = settings.vocab_size, settings.d_model, np.random.default_rng(seed)
        with bar("counting pairs", len(text) * settings.window, enabled=progress) as tick:
            keys, counts = cooccurrences(text, V, settings.window, tick=tick)
        order = rng.permutation(len(keys))
        keys, counts = keys[order], counts[order]
        self.first, self.second = (keys // V).astype(np.int32), (keys % V).astype(np.int32)
        self.log_count = np.log(counts).astype(np.float32)
        self.weight = np.minimum(1.0, (counts / settings.x_max) ** settings.alpha).astype(np.float32)
        self.chunks = -(-len(keys) // PAIRS)
        self.state: dict[str, Floats] = {name: padded(V, D) for name in ("words", "contexts")}
        for table in self.state.values():
            table[:, :D] = (rng.random((V, D), dtype=np.float32) - 0.5) / D
            table[occurrences == 0] = 0  # special tokens, and words that only occur elsewhere
        self.state |= {name: padded(V, D, fill=1.0) for name in ("word_squares", "context_squares")}
        for name in ("word_biases", "context_biases"):  # (vocab_size, 2): biases, and their sums of squares
            self.state[name] = np.tile(np.array([0.0, 1.0], dtype=np.float32), (V, 1))

    @property
    def vectors(self) -> Floats:
        """Vectors (vocab_size, d_model)."""
        return (self.state["words"] + self.state["contexts"])[:, : self.settings.d_model]

    def epoch(self, number: int, *, threads: int, tick: Advance) -> float:
        """Train on all pairs once; return the mean loss of a pair."""
        width = self.state["words"].shape[1]
        call = GloVeCall(count=len(self.first), width=width, lr=self.settings.lr)
        pairs = {"first": self.first, "second": self.second, "log_count": self.log_count, "weight": self.weight}
        return train_chunks(
            call, {**pairs, **self.state}, self.chunks, reference=self._train_chunk, threads=threads, tick=tick
        )

    def _train_chunk(self, chunk: int, loss: NDArray[np.float64]) -> None:
        """Train on one chunk of pairs as the C code does, update for update."""
        rows = slice(chunk * PAIRS, (chunk + 1) * PAIRS)
        pairs = zip(self.first[rows].tolist(), self.second[rows].tolist(), strict=True)
        for (a, b), log_count, weight in zip(pairs, self.log_count[rows], self.weight[rows], strict=True):
            for word, context in ((a, b), (b, a)) if a != b else ((a, b),):
                loss += self._update(word, context, float(log_count), weight=float(weight)), 1.0

    def _update(self, word: int, context: int, log_count: float, *, weight: float) -> float:
        """Take a step of AdaGrad on one pair; return its loss."""
        state, lr = self.state, self.settings.lr
        w, c = state["words"][word].copy(), state["contexts"][context].copy()
        biases = state["word_biases"][word, 0] + state["context_biases"][context, 0]
        difference = float(w @ c) + float(biases) - log_count
        scale = weight * difference
        for side, row, other in (("word", word, c), ("context", context, w)):
            step = np.float32(lr) * np.clip(np.float32(scale) * other, -CLIP, CLIP)
            state[f"{side}s"][row] -= step / np.sqrt(state[f"{side}_squares"][row])
            state[f"{side}_squares"][row] += step * step
            bias, step = state[f"{side}_biases"][row], lr * np.clip(scale, -CLIP, CLIP)
            bias[0] -= step / np.sqrt(bias[1])
            bias[1] += step * step
        return 0.5 * scale * difference


def cooccurrences(text: Words, vocab_size: int, window: int, *, tick: Advance) -> tuple[Keys, Counts]:
    """Count pairs of words within a window, each word with those after it: keys a · vocab_size + b with a ≤ b, sorted,
    and their counts. Two words at a distance of k count 1/k."""
    size = max(1, COUNTED // window)
    sorted_runs: list[tuple[Keys, Counts]] = []
    for begin in range(0, len(text), size):
        part = text[begin : begin + size + window].astype(np.int64)
        apart = np.cumsum(part < 0)  # words are in one document if no separator is between them
        coded = []
        for distance in range(1, window + 1):
            a, b = part[:size][: max(0, len(part) - distance)], part[distance:][:size]
            paired = (a >= 0) & (b >= 0) & (apart[: len(a)] == apart[distance:][: len(b)])
            low, high = np.minimum(a, b)[paired], np.maximum(a, b)[paired]
            coded.append((low * vocab_size + high) * (window + 1) + distance)
        tick(min(size, len(text) - begin) * window)
        codes = np.sort(np.concatenate(coded))
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        repeats = np.diff(starts, append=len(codes))
        codes = codes[starts]
        sorted_runs.append(_summed(codes // (window + 1), repeats / (codes % (window + 1))))
        while len(sorted_runs) > 1 and 2 * len(sorted_runs[-1][0]) > len(sorted_runs[-2][0]):
            sorted_runs.append(_merged(sorted_runs.pop(), sorted_runs.pop()))
    while len(sorted_runs) > 1:
        sorted_runs.append(_merged(sorted_runs.pop(), sorted_runs.pop()))
    return sorted_runs[0]


def _merged(a: tuple[Keys, Counts], b: tuple[Keys, Counts]) -> tuple[Keys, Counts]:
    keys, counts = (np.concatenate(both) for both in zip(a, b, strict=True))
    order = np.argsort(keys, kind="stable")
    return _summed(keys[order], counts[order])


def _summed(keys: Keys, counts: Counts) -> tuple[Keys, Counts]:
    """Add up the counts of equal keys, which are sorted."""
    if not len(keys):
        return keys, counts
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts)
