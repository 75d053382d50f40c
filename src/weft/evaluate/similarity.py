"""Do words that people find alike have vectors that are alike? Spearman's correlation over a list of rated pairs."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.streams import lines
from weft.errors import DataError
from weft.evaluate.classification import correlations


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

    What is left out flatters: the metrics of two vocabularies are then not those of the same pairs.
    """
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
    found = correlations(true, predicted)
    return Similarity(found["spearman"], found["pearson"], len(true), len(pairs) - len(true), missing)


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
    if "\t" in line:
        values = line.split("\t")
    elif "," in line:
        values = next(csv.reader([line]))
    elif ";" in line:
        values = line.split(";")
    else:
        values = line.split()
    return [value.strip() for value in values]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None
