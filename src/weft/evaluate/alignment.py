"""Agreement of attention with a known alignment of the words of two texts: the alignment error rate.

An alignment is written as `i-j` for word i of the source and word j of the target, counted from 0, and `ipj` for a link
that is possible but not sure. Words are separated by white space.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import DataError, counted
from weft.evaluate.bootstrap import Array, row_intervals
from weft.text.tokenizer import TokenSpan


class Link(NamedTuple):
    """A word of the source and a word of the target that belong together."""

    source: int
    target: int
    sure: int = 1


def parse_links(alignment: str, source: str, target: str) -> list[Link]:
    """Return the links of an alignment such as `0-0 1-2 2p1`; DataError if it does not fit the two texts."""
    links = []
    for item in alignment.split():
        if (match := re.fullmatch(r"(\d{1,9})([-p])(\d{1,9})", item)) is None:
            raise DataError(f"alignment {item!r}: expected links such as 0-0, or 0p1 for a possible one")
        link = Link(int(match[1]), int(match[3]), int(match[2] == "-"))
        for text, side, word in ((source, "source", link.source), (target, "target", link.target)):
            if word >= (words := len(text.split())):
                raise DataError(f"alignment {item!r}: the {side} has {counted(words, 'word')}, counted from 0")
        links.append(link)
    return links


def word_numbers(text: str, spans: Iterable[TokenSpan]) -> list[int]:
    """Return the number of the word that each token of a text is part of."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    return [max(0, bisect_right(starts, max(span.start, span.end - 1)) - 1) for span in spans]


def attended_words(
    attention: npt.NDArray[np.float32], source_words: npt.ArrayLike, target_words: npt.ArrayLike
) -> set[tuple[int, int]]:
    """Link each target word to the source word with the most attention (target tokens, source tokens)."""
    rows, columns = np.asarray(target_words), np.asarray(source_words)
    if not rows.size or not columns.size:
        return set()
    words = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(words, (rows[:, None], columns[None, :]), attention)
    return {(int(words[row].argmax()), int(row)) for row in np.unique(rows)}


def alignment_metrics(rows: Sequence[tuple[set[tuple[int, int]], Sequence[Link]]]) -> dict[str, Any]:
    """Return the alignment error rate of predicted links against the true ones of each row (Och and Ney 2003, §3.2).

    With the sure links S, the sure and possible ones P and the predicted ones A, it is
    1 − (|A ∩ S| + |A ∩ P|) ÷ (|A| + |S|), over all rows together.
    """
    counts = np.zeros((len(rows), 2))
    for row, (predicted, links) in enumerate(rows):
        sure, possible = {link[:2] for link in links if link.sure}, {link[:2] for link in links}
        counts[row] = len(predicted & sure) + len(predicted & possible), len(predicted) + len(sure)

    def measure(weights: Array) -> dict[str, float]:
        agreeing, total = weights @ counts
        return {"alignment_error": float(1 - agreeing / total) if total else 0.0}

    return {**measure(np.ones(len(rows))), "intervals": row_intervals(measure, len(rows))}
