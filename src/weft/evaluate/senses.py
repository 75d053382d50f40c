"""Senses of words in context: does the nearest occurrence of a word have the same sense?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.table import RowSource, read_rows
from weft.errors import DataError
from weft.models.hidden import MARKED, find_words

BUILTIN = "builtin:senses"
TIE = 1e-6  # difference of cosines below which two occurrences are equally near


class LabelledWord(NamedTuple):
    """Word marked in a text, such as `the river [bank]`, and its sense."""

    text: str
    word: str
    sense: str


class SenseAccuracy(NamedTuple):
    """Share of a word's occurrences whose nearest one has the same sense, by contextual and by static vectors; None if
    the model has no contextual ones."""

    word: str
    senses: int
    occurrences: int
    contextual: float | None
    static: float


def read_senses(name: str) -> list[LabelledWord]:
    """Read a table with the columns `text`, in which a word is marked as in `the river [bank]`, and `sense`; of
    builtin:senses, the held-out sentences, which no run reads in training."""
    rows = read_rows(
        RowSource([name], {"text": "text", "sense": "label"}), "validation" if name == BUILTIN else "train"
    )
    labelled, senses = list[LabelledWord](), dict[tuple[str, str], int]()
    for row in rows:
        try:
            words = find_words([row.values["text"]], MARKED)[1]
        except DataError:
            words = []
        if len(words) != 1:
            raise DataError(f"{row.where}: {len(words)} words are marked; mark one, such as: the river [bank]")
        word, sense = words[0].text.casefold(), row.values["sense"]
        labelled.append(LabelledWord(row.values["text"], word, sense))
        senses[word, sense] = senses.get((word, sense), 0) + 1
    for (word, sense), count in senses.items():
        if count < 2:
            raise DataError(f"{name}: '{word}' has one sentence of sense '{sense}'; at least two are needed to compare")
        if sum(other == word for other, _ in senses) < 2:
            raise DataError(f"{name}: '{word}' has one sense, '{sense}'; at least two are needed to compare")
    return labelled


def sense_accuracy(
    labelled: Sequence[LabelledWord], contextual: NDArray[np.float32] | None, static: NDArray[np.float32]
) -> list[SenseAccuracy]:
    """Return the accuracy of each word, and of all, by the nearest other occurrence of the word. Vectors (N, d) have
    length 1. Among equally near occurrences one is drawn at random: the result is its expectation."""
    kinds = [vectors for vectors in (contextual, static) if vectors is not None]
    scores = np.zeros((len(kinds), len(labelled)))
    accuracies = []
    for word in dict.fromkeys(each.word for each in labelled):
        rows = [row for row, each in enumerate(labelled) if each.word == word]
        senses = np.array([labelled[row].sense for row in rows])
        same = senses[:, None] == senses
        for kind, vectors in enumerate(kinds):
            cosines = vectors[rows] @ vectors[rows].T
            np.fill_diagonal(cosines, -np.inf)
            nearest = cosines >= cosines.max(axis=1, keepdims=True) - TIE
            scores[kind, rows] = (nearest & same).sum(axis=1) / nearest.sum(axis=1)
        accuracies.append(_accuracy(word, len(set(senses)), scores[:, rows]))
    return [*accuracies, _accuracy("all", len({(each.word, each.sense) for each in labelled}), scores)]


def _accuracy(word: str, senses: int, scores: NDArray[np.float64]) -> SenseAccuracy:
    *contextual, static = scores.mean(axis=1).tolist()
    return SenseAccuracy(word, senses, scores.shape[1], contextual[0] if contextual else None, static=static)
