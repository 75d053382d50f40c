"""How well labels or scores were told: accuracy, macro-F1, Matthews' correlation, the confusion matrix; and for scores
the correlations of Pearson and Spearman."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.errors import DataError

Matrix = NDArray[np.int64]


@dataclass(frozen=True)
class Classified:
    """What came of classifying. `matrix` (labels, labels) counts rows by true label, columns by the label told."""

    labels: tuple[str, ...]
    matrix: Matrix

    @property
    def count(self) -> int:
        """How many were classified."""
        return int(self.matrix.sum())

    @property
    def accuracy(self) -> float:
        """The share that was told right."""
        return accuracy(self.matrix)

    @property
    def macro_f1(self) -> float:
        """The mean of the labels' F1."""
        return macro_f1(self.matrix)

    @property
    def matthews(self) -> float:
        """Matthews' correlation."""
        return matthews(self.matrix)

    def metrics(self) -> dict[str, float]:
        """The metrics by name, as logs and tables show them."""
        return {"accuracy": self.accuracy, "macro_f1": self.macro_f1, "matthews": self.matthews}

    def each(self) -> list[tuple[str, float, float, float, int]]:
        """(label, precision, recall, F1, how many there truly are), label by label."""
        columns = precision(self.matrix), recall(self.matrix), f1(self.matrix), self.matrix.sum(axis=1)
        return [
            (label, float(p), float(r), float(f), int(n))
            for label, p, r, f, n in zip(self.labels, *columns, strict=True)
        ]


@dataclass(frozen=True)
class Correlated:
    """What came of telling scores."""

    pearson: float
    spearman: float
    count: int

    def metrics(self) -> dict[str, float]:
        """The figures by name."""
        return {"pearson": self.pearson, "spearman": self.spearman}


def classified(truth: Sequence[int], told: Sequence[int], labels: Sequence[str]) -> Classified:
    """Compare labels, given as their numbers in `labels`."""
    return Classified(tuple(labels), confusion(truth, told, len(labels)))


def correlated(truth: ArrayLike, told: ArrayLike) -> Correlated:
    """Compare scores (N,)."""
    true, said = _pair(truth, told)
    return Correlated(pearson(true, said), spearman(true, said), len(true))


# ---- labels


def confusion(truth: Sequence[int], told: Sequence[int], labels: int) -> Matrix:
    """(labels, labels) counts: row the true label, column the one told."""
    true, said = np.asarray(truth, dtype=np.int64), np.asarray(told, dtype=np.int64)
    if true.shape != said.shape or true.ndim != 1:
        raise DataError(f"{true.size} true labels, but {said.size} were told; each has one")
    if not true.size:
        raise DataError("nothing was classified; there is nothing to measure")
    for numbers in (true, said):
        if numbers.min() < 0 or numbers.max() >= labels:
            wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
            raise DataError(f"label number {wrong} is none of the {labels} there are (0 … {labels - 1})")
    return np.bincount(true * labels + said, minlength=labels * labels).reshape(labels, labels)


def accuracy(matrix: Matrix) -> float:
    """The share of the diagonal."""
    return float(np.trace(matrix) / matrix.sum())


def precision(matrix: Matrix) -> NDArray[np.float64]:
    """(labels,): of those told to be so, how many are. 0 where none was told."""
    return _over(np.diag(matrix), matrix.sum(axis=0))


def recall(matrix: Matrix) -> NDArray[np.float64]:
    """(labels,): of those that are so, how many were told. 0 where none is."""
    return _over(np.diag(matrix), matrix.sum(axis=1))


def f1(matrix: Matrix) -> NDArray[np.float64]:
    """(labels,): the harmonic mean of precision and recall, 2 · right ÷ (told + true)."""
    return _over(2 * np.diag(matrix), matrix.sum(axis=0) + matrix.sum(axis=1))


def macro_f1(matrix: Matrix) -> float:
    """The mean of F1 over the labels that occur, either truly or as told: each counts alike, however rare."""
    occurs = matrix.sum(axis=0) + matrix.sum(axis=1) > 0
    return float(f1(matrix)[occurs].mean())


def matthews(matrix: Matrix) -> float:
    """Matthews' correlation for any number of labels (Gorodkin 2004); 0 where either side holds one label alone."""
    counts = matrix.astype(np.float64)
    true, told, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    covariance = np.trace(counts) * total - true @ told
    spread = (total**2 - told @ told) * (total**2 - true @ true)
    return float(covariance / math.sqrt(spread)) if spread > 0 else 0.0


def _over(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


# ---- scores


def pearson(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of two rows of numbers (N,); nan where one of them never changes."""
    a, b = _pair(one, other)
    a, b = a - a.mean(), b - b.mean()
    a_size, b_size = np.linalg.norm(a), np.linalg.norm(b)
    if not a_size or not b_size:
        return math.nan
    return float(np.clip((a / a_size) @ (b / b_size), -1.0, 1.0))


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of their ranks; equal numbers share the mean of the ranks they take."""
    a, b = _pair(one, other)
    return pearson(ranks(a), ranks(b))


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """(N,) ranks from 1; equal values share the mean of theirs."""
    _, group, sizes = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return (ends - (sizes - 1) / 2)[group]


def _pair(one: ArrayLike, other: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise DataError(f"{a.size} numbers against {b.size}; each needs its partner")
    if a.size < 2:
        raise DataError(f"a correlation of {a.size} pairs; at least two are needed")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError("a correlation of numbers that are not all finite")
    return a, b
