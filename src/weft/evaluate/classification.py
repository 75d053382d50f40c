"""How well labels or numbers were predicted: accuracy, macro F1, Matthews' correlation and the confusion matrix for
labels; the correlations of Pearson and Spearman for numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.errors import DataError

Matrix = NDArray[np.int64]


def label_metrics(actual: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """Metrics of labels, given as their places in `labels`, and the confusion matrix: a row for each actual label."""
    matrix = confusion(actual, predicted, len(labels))
    return {
        "accuracy": accuracy(matrix),
        "macro_f1": macro_f1(matrix),
        "matthews": matthews(matrix),
        "labels": list(labels),
        "matrix": matrix.tolist(),
    }


# ---- labels


def confusion(actual: Sequence[int], predicted: Sequence[int], labels: int) -> Matrix:
    """(labels, labels) counts: row the actual label, column the predicted one."""
    if not actual:
        raise DataError("nothing was classified; there is nothing to measure")
    pairs = np.asarray(actual, dtype=np.int64) * labels + np.asarray(predicted, dtype=np.int64)
    return np.bincount(pairs, minlength=labels * labels).reshape(labels, labels)


def accuracy(matrix: Matrix) -> float:
    """The share of the diagonal."""
    return float(np.trace(matrix) / matrix.sum())


def macro_f1(matrix: Matrix) -> float:
    """The mean of F1 = 2 · right ÷ (predicted + actual) over the labels that occur: each counts alike, however rare."""
    occurs = matrix.sum(axis=0) + matrix.sum(axis=1)
    return float((2 * np.diag(matrix)[occurs > 0] / occurs[occurs > 0]).mean())


def matthews(matrix: Matrix) -> float:
    """Matthews' correlation for any number of labels (Gorodkin 2004); 0 where either side has one label alone."""
    counts = matrix.astype(np.float64)
    actual, predicted, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    covariance = np.trace(counts) * total - actual @ predicted
    spread = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    return float(covariance / math.sqrt(spread)) if spread > 0 else 0.0


# ---- numbers


def correlations(one: ArrayLike, other: ArrayLike) -> dict[str, float]:
    """Pearson's and Spearman's correlation of two rows of numbers (N,)."""
    return {"pearson": pearson(one, other), "spearman": spearman(one, other)}


def pearson(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of two rows of numbers (N,); nan where one of them never changes."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.size < 2:
        raise DataError(f"a correlation of {a.size} pairs; at least two are needed")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError("a correlation of numbers that are not all finite")
    a, b = a - a.mean(), b - b.mean()
    a_size, b_size = np.linalg.norm(a), np.linalg.norm(b)
    if not a_size or not b_size:
        return math.nan
    return float(np.clip((a / a_size) @ (b / b_size), -1.0, 1.0))


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of their ranks; equal numbers share the mean of the ranks they take."""
    return pearson(ranks(one), ranks(other))


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """(N,) ranks from 1; equal values share the mean of theirs."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return (ends - (sizes - 1) / 2)[group]
