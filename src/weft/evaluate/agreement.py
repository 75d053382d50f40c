"""Agreement of predictions with human judgements: labels, numbers, and similarity of words."""

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.data.streams import lines
from weft.errors import DataError
from weft.evaluate.bootstrap import DRAWS, row_intervals

MIN_DRAWS = 200  # of a bootstrap over many answers
MAX_DRAWN_ANSWERS = 100_000_000  # in all draws together, which takes some seconds


def label_metrics(actual: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """Metrics of labels, given as indices into `labels`, and the confusion matrix with a row per actual label."""
    matrix = confusion(actual, predicted, len(labels))
    return {**_agreement(matrix), "labels": list(labels), "matrix": matrix.tolist()}


def label_intervals(
    actual: Sequence[int], predicted: Sequence[int], *, losses: ArrayLike, rows: Sequence[int]
) -> dict[str, Any]:
    """Return the accuracy of always predicting the commonest label, and intervals from a bootstrap over rows."""
    labels = 1 + max(max(actual), max(predicted))
    cells, costs = np.asarray(actual) * labels + np.asarray(predicted), np.asarray(losses, dtype=np.float64)
    baseline = confusion(actual, predicted, labels).sum(axis=1).max() / len(cells)
    owners, count = np.asarray(rows), 1 + max(rows)  # all answers (N,) of a row, a sentence, are drawn together

    def measure(row_weights: NDArray[np.float64]) -> dict[str, float]:
        weights = row_weights[owners]
        matrix = np.bincount(cells, weights, labels * labels).reshape(labels, labels)
        return {"loss": float(weights @ costs / weights.sum()), **_agreement(matrix)}

    draws = min(DRAWS, max(MIN_DRAWS, MAX_DRAWN_ANSWERS // len(cells)))
    return {"baseline_accuracy": float(baseline), "rows": count, "intervals": row_intervals(measure, count, draws)}


def _agreement(matrix: NDArray[Any]) -> dict[str, float]:
    accuracy = float(np.trace(matrix) / matrix.sum())
    return {"accuracy": accuracy, "macro_f1": macro_f1(matrix), "matthews": matthews(matrix)}


def confusion(actual: Sequence[int], predicted: Sequence[int], labels: int) -> NDArray[np.int64]:
    """Counts (labels, labels), with a row per actual and a column per predicted label."""
    if not actual:
        raise DataError("nothing was classified; there is nothing to measure")
    pairs = np.asarray(actual, dtype=np.int64) * labels + np.asarray(predicted, dtype=np.int64)
    return np.bincount(pairs, minlength=labels * labels).reshape(labels, labels)


def macro_f1(matrix: NDArray[Any]) -> float:
    """Unweighted mean of F1 = 2 · correct ÷ (predicted + actual) over the labels that occur."""
    occurrences = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * np.diag(matrix)[occurrences > 0] / occurrences[occurrences > 0]).mean())


def matthews(matrix: NDArray[Any]) -> float:
    """Matthews correlation coefficient of any number of labels (Gorodkin 2004); 0 if either side has one label only."""
    counts = matrix.astype(np.float64)
    actual, predicted, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    covariance = np.trace(counts) * total - actual @ predicted
    variances = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    return float(covariance / math.sqrt(variances)) if variances > 0 else 0.0


def correlations(a: ArrayLike, b: ArrayLike) -> dict[str, float]:
    """Pearson's and Spearman's correlation of values (N,); Spearman's is Pearson's of their ranks."""
    return {"pearson": pearson(a, b), "spearman": pearson(ranks(a), ranks(b))}


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson's correlation of values (N,); NaN if one side is constant."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.size < 2:
        raise DataError(f"a correlation of {x.size} pairs; at least two are needed")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise DataError("a correlation of numbers that are not all finite")
    x, y = x - x.mean(), y - y.mean()
    x_norm, y_norm = np.linalg.norm(x), np.linalg.norm(y)
    return float(np.clip((x / x_norm) @ (y / y_norm), -1.0, 1.0)) if x_norm and y_norm else math.nan


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks (N,) from 1; ties share their mean rank."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group]


RatedPair = tuple[str, str, float]  # two words, and a human rating of their similarity


@dataclass(frozen=True)
class Similarity:
    """Correlation of cosines with human ratings. Leaving out pairs with an unknown word flatters a small vocabulary."""

    spearman: float
    pearson: float
    pairs: int
    left_out: int
    missing: tuple[str, ...]  # words without a vector


def similarity(pairs: Sequence[RatedPair], vector: Callable[[str], NDArray[np.float32] | None]) -> Similarity:
    """Correlate human ratings with the cosines of the words' vectors; `vector` returns None for an unknown word.

    Leaving pairs out flatters a model: two vocabularies may then be measured on different pairs.
    """
    vectors = {word: vector(word) for word in dict.fromkeys(word for one, other, _ in pairs for word in (one, other))}
    cosines, scores = [], []
    for first_word, second_word, score in pairs:
        first, second = vectors[first_word], vectors[second_word]
        if first is not None and second is not None:
            cosines.append(cosine(first, second))
            scores.append(score)
    if len(scores) < 2:
        raise DataError(f"{len(scores)} of {len(pairs)} pairs have both words in the vocabulary; at least 2 are needed")
    if len(set(scores)) < 2:
        raise DataError(f"all {len(scores)} pairs are rated {scores[0]:g}; a correlation needs different ratings")
    missing = tuple(word for word, found in vectors.items() if found is None)
    left_out = len(pairs) - len(scores)
    return Similarity(**correlations(scores, cosines), pairs=len(scores), left_out=left_out, missing=missing)


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Cosine of the angle between two vectors; 0 if one of them is zero."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def read_pairs(name: str) -> list[RatedPair]:
    """Read rated pairs from a file: two words and a score per line, separated by tabs, commas or spaces.

    Lines that begin with # are comments. A first line without a number is a header. If there are more columns, as in
    SimLex-999 with its part of speech after the words, the score is the first number after the words.
    """
    numbered = ((number, line.strip("\r\n")) for number, line in enumerate(lines(name), 1))
    rows = [(number, _cells(line)) for number, line in numbered if line.strip() and not line.startswith("#")]
    if not rows:
        raise DataError(f"{name}: holds no pairs of words")
    if not any(map(_is_number, rows[0][1])):
        rows = rows[1:]
    pairs = []
    for number, cells in rows:
        score = next((cell for cell in cells[2:] if _is_number(cell)), None)
        if score is None or not cells[0] or not cells[1]:
            raise DataError(f"{name}: line {number}: expected two words and a number, for instance 'cup  mug  8.5'")
        pairs.append((cells[0], cells[1], float(score)))
    if not pairs:
        raise DataError(f"{name}: holds a header, but no pairs of words")
    return pairs


def _cells(line: str) -> list[str]:
    separator = next((sign for sign in "\t,;" if sign in line), None)
    return [cell.strip() for cell in (next(csv.reader([line])) if separator == "," else line.split(separator))]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
