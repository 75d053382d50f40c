"""Words as points in two dimensions: the first two principal components of their vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.errors import DataError
from weft.explain.neighbours import InContext, Neighbour, embedding_table, signed_words, word_vector
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.picture import COLOURS
from weft.figures.tables import Table
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

MARKERS = "osD^v"
MAX_LABELS = 60  # words of a map that are named


@dataclass(frozen=True)
class WordMap(Charts):
    """Words (n,) by the two principal components of their vectors, points (n, 2), in one colour per group."""

    name: str
    words: tuple[str, ...]
    groups: tuple[str, ...]
    points: NDArray[np.float64]
    share: float  # of the vectors' variance that two dimensions show

    title = "Words in two dimensions"
    about = TEXTS["word-map"]
    size = (6.4, 4.8)

    def charts(self) -> list[Chart]:
        return [Chart(self.name, self._draw)]

    def tables(self) -> list[Table]:
        places = zip(self.words, self.groups, self.points.tolist(), strict=True)
        rows = [(word, group, f"{x:.3f}", f"{y:.3f}") for word, group, (x, y) in places]
        return [Table(("word", "group", "x", "y"), rows, text=(0, 1))]

    def _draw(self, axes: Any) -> None:
        for number, group in enumerate(dict.fromkeys(self.groups)):
            rows = [row for row, name in enumerate(self.groups) if name == group]
            colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
            axes.plot(*self.points[rows].T, marker, color=colour, markersize=4, alpha=0.8, label=group or None)
        for word, point in list(zip(self.words, self.points, strict=True))[:MAX_LABELS]:
            axes.annotate(word, point, xytext=(3, 3), textcoords="offset points", fontsize=8, parse_math=False)
        axes.margins(0.12)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(f"first two principal components, {self.share:.0%} of the variance", fontsize=8.5)
        if any(self.groups):
            axes.legend(fontsize=8, frameon=False)


def word_map(name: str, words: Sequence[str], vectors: ArrayLike, *, groups: Sequence[str] = ()) -> WordMap:
    """Project vectors (n, d) onto their first two principal components."""
    values = np.asarray(vectors, dtype=np.float64)
    if len(values) < 3:
        raise DataError(f"a map of {len(values)} words; at least three are needed")
    left, scales, right = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    # the sign of a component is arbitrary: the largest weight is made positive, so that equal data give equal maps
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])[:2]
    share = float((scales[:2] ** 2).sum() / max(1e-30, (scales**2).sum()))
    return WordMap(name, tuple(words), tuple(groups or [""] * len(words)), left[:, :2] * scales[:2] * signs, share)


def neighbour_map(model: LanguageModel, tokenizer: Tokenizer, word: str, *, nearest: Sequence[Neighbour]) -> WordMap:
    """Map a word, or the words of a sum, with the nearest neighbours by the embedding table."""
    words = [each for _, each in signed_words(word)]
    own = [vector for each in words if (vector := word_vector(model, tokenizer, each)) is not None]
    table = embedding_table(model)[[near.id for near in nearest]].float().cpu().numpy()
    groups = ["given"] * len(words) + ["nearest"] * len(nearest)
    vectors = np.concatenate([np.stack(own), table])
    vectors /= np.maximum(1e-30, np.linalg.norm(vectors, axis=1, keepdims=True))
    return word_map(f"nearest to {word}", [*words, *(near.text for near in nearest)], vectors, groups=groups)


def context_map(words: InContext, word: str) -> WordMap:
    """Map the occurrences of a word in sentences, each named by its number and the word before it."""
    rows = [row for row, each in enumerate(words.words) if each.text.casefold() == word.casefold()]
    names = [f"{words.words[row].sentence + 1}: …{_before(words, row)} {words.words[row].text}" for row in rows]
    return word_map(f"{word} in context", names, words.vectors[rows])


def _before(words: InContext, row: int) -> str:
    same = row > 0 and words.words[row - 1].sentence == words.words[row].sentence
    return f" {words.words[row - 1].text}" if same else ""
