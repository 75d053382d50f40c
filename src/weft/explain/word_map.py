"""Words as points in two dimensions of their vectors: principal components, or axes that separate senses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.errors import DataError
from weft.explain.neighbours import InContext, Neighbour, embedding_table, signed_words, unit_rows, word_vector
from weft.explain.texts import TEXTS
from weft.figures.charts import Chart, Charts
from weft.figures.picture import COLOURS
from weft.figures.tables import Table
from weft.models.base import LanguageModel
from weft.text.tokenizer import Tokenizer

MARKERS = "osD^v"
MIN_FITTED = 4  # sentences of each sense that a discriminant is fitted to; with fewer, principal components are drawn
MAX_LABELS = 60  # words of a map that are named


@dataclass(frozen=True)
class Cloud:
    """Points of one title: words (n,) at (n, 2), in one colour per group; words are written beside them if `named`."""

    title: str
    words: tuple[str, ...]
    groups: tuple[str, ...]
    points: NDArray[np.float64]
    axes: str  # what the two dimensions are
    named: bool = True


@dataclass(frozen=True)
class WordMap(Charts):
    """Clouds of words, each by its two principal components."""

    clouds: tuple[Cloud, ...]

    title = "Words in two dimensions"
    about = TEXTS["word-map"]
    size = (6.4, 4.8)

    def charts(self) -> list[Chart]:
        return [Chart(cloud.title, partial(_draw, cloud)) for cloud in self.clouds]

    def tables(self) -> list[Table]:
        several = len(self.clouds) > 1
        rows = [
            (cloud.title if several else "", word, group, f"{x:.3f}", f"{y:.3f}")
            for cloud in self.clouds
            for word, group, (x, y) in zip(cloud.words, cloud.groups, cloud.points.tolist(), strict=True)
        ]
        return [Table(("map" if several else "", "word", "group", "x", "y"), rows, text=(0, 1, 2))]


class SenseMap(WordMap):
    """Clouds of several words, small and side by side."""

    columns = 3
    size = (3.6, 2.9)


def cloud(
    title: str, words: Sequence[str], vectors: ArrayLike, *, groups: Sequence[str] = (), named: bool = True
) -> Cloud:
    """Project vectors (n, d) onto their first two principal components."""
    values = np.asarray(vectors, dtype=np.float64)
    if len(values) < 3:
        raise DataError(f"a map of {len(values)} words; at least three are needed")
    centred = values - values.mean(axis=0)
    left, scales, right = np.linalg.svd(centred, full_matrices=False)
    # the sign of a component is arbitrary: the largest weight is made positive, so that equal data give equal maps
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])[:2]
    points = left[:, :2] * scales[:2] * signs
    share = float((scales[:2] ** 2).sum() / max(1e-30, (scales**2).sum()))
    axes = f"first two principal components, {share:.0%} of the variance"
    return Cloud(title, tuple(words), tuple(groups or [""] * len(words)), points, axes, named)


def neighbour_map(model: LanguageModel, tokenizer: Tokenizer, word: str, *, nearest: Sequence[Neighbour]) -> WordMap:
    """Map a word, or the words of a sum, with the nearest neighbours by the embedding table."""
    words = [each for _, each in signed_words(word)]
    own = [vector for each in words if (vector := word_vector(model, tokenizer, each)) is not None]
    table = embedding_table(model)[[near.id for near in nearest]].float().cpu().numpy()
    groups = ["given"] * len(words) + ["nearest"] * len(nearest)
    vectors = unit_rows(np.concatenate([np.stack(own), table]))
    return WordMap((cloud(f"nearest to {word}", [*words, *(near.text for near in nearest)], vectors, groups=groups),))


def context_map(words: InContext, word: str) -> WordMap:
    """Map the occurrences of a word in sentences, each named by its number and the word before it."""
    rows = [row for row, each in enumerate(words.words) if each.text.casefold() == word.casefold()]
    names = [f"{words.words[row].sentence + 1}: …{_before(words, row)} {words.words[row].text}" for row in rows]
    return WordMap((cloud(f"{word} in context", names, words.vectors[rows]),))


def _before(words: InContext, row: int) -> str:
    same = row > 0 and words.words[row - 1].sentence == words.words[row].sentence
    return f" {words.words[row - 1].text}" if same else ""


def sense_map(words: Sequence[str], senses: Sequence[str], vectors: NDArray[np.float32]) -> SenseMap:
    """Map the occurrences of each word, with vectors (n, d), in one colour per sense.

    Half of a sense's sentences decide the axes, so that they separate the senses (Fisher 1936); the others are drawn.
    """
    clouds = []
    for word in dict.fromkeys(words):
        by_sense: dict[str, list[int]] = {}
        for row in (row for row, each in enumerate(words) if each == word):
            by_sense.setdefault(senses[row], []).append(row)
        by_sense = dict(sorted(by_sense.items()))
        separated = len(by_sense) > 1 and all(len(rows) >= 2 * MIN_FITTED for rows in by_sense.values())
        shown = {sense: rows[1::2] if separated else rows for sense, rows in by_sense.items()}
        drawn = [row for rows in shown.values() for row in rows]
        groups = [sense for sense, rows in shown.items() for _ in rows]
        if separated:
            axes = _discriminants([vectors[rows[::2]].astype(np.float64) for rows in by_sense.values()])
            label = "axes that separate other sentences"
            points = vectors[drawn].astype(np.float64) @ axes
            clouds.append(Cloud(word, (word,) * len(drawn), tuple(groups), points, label, named=False))
        else:
            clouds.append(cloud(word, [word] * len(drawn), vectors[drawn], groups=groups, named=False))
    return SenseMap(tuple(clouds))


def _discriminants(classes: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return two orthonormal directions (d, 2): discriminants of classes (n, d), then the rest's first component."""
    means = np.stack([each.mean(axis=0) for each in classes])
    within = np.concatenate([each - mean for each, mean in zip(classes, means, strict=True)])
    scatter = within.T @ within / len(within)
    scatter += np.eye(len(scatter)) * max(1e-12, np.trace(scatter) / len(scatter))  # few sentences, many dimensions
    directions, _, _ = np.linalg.svd(np.linalg.solve(scatter, (means - means.mean(axis=0)).T), full_matrices=False)
    first = directions[:, : min(2, len(classes) - 1)]
    rest = within - within @ first @ first.T
    _, _, components = np.linalg.svd(rest, full_matrices=False)
    return np.concatenate([first, components[:1].T], axis=1)[:, :2]


def _draw(cloud: Cloud, axes: Any) -> None:
    for number, group in enumerate(dict.fromkeys(cloud.groups)):
        rows = [row for row, name in enumerate(cloud.groups) if name == group]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(*cloud.points[rows].T, marker, color=colour, markersize=5, alpha=0.8, label=group or None)
    if cloud.named:
        for word, point in list(zip(cloud.words, cloud.points, strict=True))[:MAX_LABELS]:
            others = sorted(cloud.points.tolist(), key=lambda other: np.hypot(*(other - point)))
            offset = (3, -11 if others[1][1] > point[1] else 3)  # away from the nearest
            axes.annotate(word, point, xytext=offset, textcoords="offset points", fontsize=9, parse_math=False)
        axes.set_aspect("equal", adjustable="datalim")  # words that are drawn close are close
    axes.margins(0.12)
    axes.set_xticks([])
    axes.set_yticks([])
    grouped = any(cloud.groups)
    axes.set_xlabel(cloud.axes, fontsize=9, labelpad=20 if grouped else 4)
    if grouped:  # between the axis and its label, where no point is
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": len(set(cloud.groups))}
        axes.legend(**place, fontsize=9, frameon=False, columnspacing=1.0, handletextpad=0.1)
