"""How well predictions agree with what people say: labels, numbers, and how alike two words are."""

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.data.streams import lines
from weft.errors import DataError
from weft.evaluate.bootstrap import DRAWS, row_intervals

Matrix = NDArray[np.int64]
MIN_DRAWS = 200  # of a bootstrap, however many answers there are
MAX_DRAWN_ANSWERS = 100_000_000  # in all draws together: some seconds


def label_metrics(actual: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """Metrics of labels, given as their places in `labels`, and the confusion matrix: a row for each actual label."""
    matrix = confusion(actual, predicted, len(labels))
    return {**_agreement(matrix), "labels": list(labels), "matrix": matrix.tolist()}


def label_intervals(
    actual: Sequence[int], predicted: Sequence[int], losses: ArrayLike, rows: Sequence[int]
) -> dict[str, Any]:
    """What stands beside the metrics: the share of the commonest label, and intervals by a bootstrap over rows. Each
    answer (N,) has its loss and the number of the row it belongs to: all words of a sentence are drawn together."""
    labels = 1 + max(max(actual), max(predicted))
    cells, costs = np.asarray(actual) * labels + np.asarray(predicted), np.asarray(losses, dtype=np.float64)
    baseline = confusion(actual, predicted, labels).sum(axis=1).max() / len(cells)
    owners, count = np.asarray(rows), 1 + max(rows)

    def measure(drawn: NDArray[np.float64]) -> dict[str, float]:
        often = drawn[owners]
        matrix = np.bincount(cells, often, labels * labels).reshape(labels, labels)
        return {"loss": float(often @ costs / often.sum()), **_agreement(matrix)}

    draws = min(DRAWS, max(MIN_DRAWS, MAX_DRAWN_ANSWERS // len(cells)))
    return {"baseline_accuracy": float(baseline), "rows": count, "intervals": row_intervals(measure, count, draws)}


def _agreement(matrix: NDArray[Any]) -> dict[str, float]:
    accuracy = float(np.trace(matrix) / matrix.sum())
    return {"accuracy": accuracy, "macro_f1": macro_f1(matrix), "matthews": matthews(matrix)}


def confusion(actual: Sequence[int], predicted: Sequence[int], labels: int) -> Matrix:
    """(labels, labels) counts: row the actual label, column the predicted one."""
    if not actual:
        raise DataError("nothing was classified; there is nothing to measure")
    pairs = np.asarray(actual, dtype=np.int64) * labels + np.asarray(predicted, dtype=np.int64)
    return np.bincount(pairs, minlength=labels * labels).reshape(labels, labels)


def macro_f1(matrix: NDArray[Any]) -> float:
    """The mean of F1 = 2 · right ÷ (predicted + actual) over the labels that occur: each counts alike, however rare."""
    occurs = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * np.diag(matrix)[occurs > 0] / occurs[occurs > 0]).mean())


def matthews(matrix: NDArray[Any]) -> float:
    """Matthews' correlation for any number of labels (Gorodkin 2004); 0 where either side has one label alone."""
    counts = matrix.astype(np.float64)
    actual, predicted, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    covariance = np.trace(counts) * total - actual @ predicted
    spread = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    return float(covariance / math.sqrt(spread)) if spread > 0 else 0.0


def correlations(one: ArrayLike, other: ArrayLike) -> dict[str, float]:
    """Pearson's and Spearman's correlation of two rows of numbers (N,): the second is that of their ranks."""
    return {"pearson": pearson(one, other), "spearman": pearson(ranks(one), ranks(other))}


def pearson(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of two rows of numbers (N,); nan where one of them never changes."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.size < 2:
        raise DataError(f"a correlation of {a.size} pairs; at least two are needed")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError("a correlation of numbers that are not all finite")
    a, b = a - a.mean(), b - b.mean()
    a_size, b_size = np.linalg.norm(a), np.linalg.norm(b)
    return float(np.clip((a / a_size) @ (b / b_size), -1.0, 1.0)) if a_size and b_size else math.nan


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """(N,) ranks from 1; equal values share the mean of theirs."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group]


class Pair(NamedTuple):
    """Two words and how alike people find them."""

    first: str
    second: str
    score: float


@dataclass(frozen=True)
class Similarity:
    """How cosines and judgements correlate; words that have no vector take no part, and are listed."""

    spearman: float
    pearson: float
    pairs: int
    left_out: int
    missing: tuple[str, ...]


def similarity(pairs: Sequence[Pair], vector: Callable[[str], NDArray[np.float32] | None]) -> Similarity:
    """Correlate people's scores with the cosines of the words' vectors; `vector` gives None for a word it doesn't know.
    What is left out flatters: the metrics of two vocabularies are then not those of the same pairs."""
    known = {word: vector(word) for word in dict.fromkeys(word for pair in pairs for word in pair[:2])}
    predicted, true = [], []
    for pair in pairs:
        one, other = known[pair.first], known[pair.second]
        if one is not None and other is not None:
            predicted.append(cosine(one, other))
            true.append(pair.score)
    missing = tuple(word for word, found in known.items() if found is None)
    if len(true) < 2:
        raise DataError(f"{len(true)} of {len(pairs)} pairs have both words in the vocabulary; at least 2 are needed")
    left_out = len(pairs) - len(true)
    return Similarity(**correlations(true, predicted), pairs=len(true), left_out=left_out, missing=missing)


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is nothing."""
    sizes = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / sizes if sizes else 0.0


def read_pairs(name: str) -> list[Pair]:
    """Rated pairs from a file: two words and a score a line, apart by tabs, commas or spaces.

    Lines that begin with # are remarks. A first line without a number is a header. Where there are more columns (as in
    SimLex-999 itself, which has a part of speech after the words), the first number after the words is the score.
    """
    written = ((number, line.strip("\r\n")) for number, line in enumerate(lines(name), 1))
    cells = [(number, _cells(line)) for number, line in written if line.strip() and not line.startswith("#")]
    if not cells:
        raise DataError(f"{name}: holds no pairs of words")
    if not any(map(_is_number, cells[0][1])):
        cells = cells[1:]
    pairs = []
    for number, values in cells:
        score = next((value for value in values[2:] if _is_number(value)), None)
        if score is None or not values[0] or not values[1]:
            raise DataError(f"{name}: line {number}: expected two words and a number, for instance 'cup  mug  8.5'")
        pairs.append(Pair(values[0], values[1], float(score)))
    if not pairs:
        raise DataError(f"{name}: holds a header, but no pairs of words")
    return pairs


def _cells(line: str) -> list[str]:
    sign = next((sign for sign in "\t,;" if sign in line), None)
    values = next(csv.reader([line])) if sign == "," else line.split(sign)
    return [value.strip() for value in values]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
