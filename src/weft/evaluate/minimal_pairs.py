"""Minimal pairs: which of two sentences that differ in one respect is likelier (Warstadt et al. 2020, BLiMP)?"""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.config import check_encoding
from weft.data.rows import TABLES, Malformed, MissingColumnError, records, text_of
from weft.data.streams import format_of
from weft.errors import DataError, counted
from weft.figures.charts import Charts
from weft.figures.plot import LOOKS, Axis, Plot, Whisker, whiskers
from weft.figures.tables import Table
from weft.storage.files import is_text

# names of a column: BLiMP's first
COLUMNS = {
    "good": ("sentence_good", "good"),
    "bad": ("sentence_bad", "bad"),
    "source": ("source",),
    "field": ("field",),
    "phenomenon": ("linguistics_term", "phenomenon"),
    "paradigm": ("UID", "paradigm"),
}
# BLiMP's critical words: after one prefix, two words differ; after two prefixes, one word is the same
PREFIXES = (
    (("one_prefix_prefix", "one_prefix_word_good"), ("one_prefix_prefix", "one_prefix_word_bad")),
    (("two_prefix_prefix_good", "two_prefix_word"), ("two_prefix_prefix_bad", "two_prefix_word")),
)
LEVELS = ("all", "field", "phenomenon", "paradigm")
CHANCE = 50  # % of pairs
ROUNDING = 2**-22  # share of log p up to which two sums of logarithms in float32 are the same
Z = 1.959964  # standard deviations of a normal distribution, for 95 %


class CriticalWord(NamedTuple):
    """A word, and the beginning of a sentence before it."""

    prefix: str
    word: str


class MinimalPair(NamedTuple):
    """An acceptable sentence and an unacceptable one, and the word in each that decides."""

    good: str
    bad: str
    source: str | None = None  # text whose translations are compared, for an encoder–decoder
    critical: tuple[CriticalWord, CriticalWord] | None = None
    field: str = ""
    phenomenon: str = ""
    paradigm: str = ""
    where: str = ""  # file and line


class PairScore(NamedTuple):
    """log p of both sentences of a pair, or of the words that decide."""

    good: float
    bad: float

    @property
    def value(self) -> float:
        """1 if the good sentence is likelier, 0 if the bad one is, 0.5 in a tie, that is, to within rounding."""
        tie = math.isclose(self.good, self.bad, rel_tol=ROUNDING)
        return 0.5 if tie else float(self.good > self.bad)


class Accuracy(NamedTuple):
    """Share of pairs, or of questions, that are right, with Wilson's 95 % interval (1927).

    It never has the width 0, not even where all are right, and is a little too wide for values between 0 and 1.
    """

    pairs: int
    accuracy: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Accuracy":
        """Return the mean of values from 0 to 1, of which a tie is 0.5."""
        n, mean = len(values), math.fsum(values) / len(values)
        middle, half = mean + Z**2 / (2 * n), Z * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        low, high = ((middle + side * half) / (1 + Z**2 / n) for side in (-1, 1))
        return cls(n, mean, min(max(low, 0.0), mean), max(min(high, 1.0), mean))


class PairGroup(NamedTuple):
    """Accuracy of the pairs of a field, a phenomenon or a paradigm, by the method of scoring."""

    level: str
    name: str
    pairs: int
    accuracies: Mapping[str, Accuracy]


@dataclass(frozen=True)
class MinimalPairs(Charts):
    """Scores of pairs by method; a method leaves out the pairs to which it does not apply."""

    model: str
    pairs: Sequence[MinimalPair]
    scores: Mapping[str, Sequence[PairScore | None]]
    remarks: Sequence[str] = ()

    title = "Minimal pairs"
    about = (
        "Of two sentences that differ in one respect, a model that has learned the rule finds the acceptable one "
        "likelier. Points show the share of pairs where it does, lines the 95% interval; chance is 50%."
    )

    @cached_property
    def groups(self) -> list[PairGroup]:
        """Accuracy over all pairs, then by field, phenomenon and paradigm, as far as there are several."""
        groups = []
        for level in LEVELS:
            members: dict[str, list[int]] = {}
            for index, pair in enumerate(self.pairs):
                members.setdefault("all pairs" if level == "all" else getattr(pair, level), []).append(index)
            if level != "all" and (len(members) == 1 or set(members) == {""}):
                continue
            for name, indices in sorted(members.items()):
                scored = {
                    method: [score.value for index in indices if (score := scores[index]) is not None]
                    for method, scores in self.scores.items()
                }
                accuracies = {method: Accuracy.of(present) for method, present in scored.items() if present}
                groups.append(PairGroup(level, name, len(indices), accuracies))
        return groups

    @property
    def accuracy(self) -> float:
        """Accuracy over all pairs by the first method."""
        return next(iter(self.groups[0].accuracies.values())).accuracy

    def charts(self) -> list[Plot]:
        level = next((level for level in ("phenomenon", "paradigm", "field") if self._of(level)), "all")
        rows = [
            Whisker("" if index else _readable(group.name), 100 * mean, 100 * low, 100 * high, look)
            for group in self._of(level)
            for index, ((_, mean, low, high), look) in enumerate(zip(group.accuracies.values(), LOOKS, strict=False))
        ]
        share = Axis("% of pairs whose acceptable sentence is likelier")
        legend = "   ".join(f"{marker} {method}" for marker, method in zip("■▲", self.scores, strict=False))
        return [whiskers(legend, rows, share, neutral=CHANCE)]

    def tables(self) -> list[Table]:
        methods = list(self.scores)
        header = ["", "pairs", *(cell for method in methods for cell in (method, "95% interval"))]
        tables = []
        for level in LEVELS:
            rows = [
                (_readable(group.name), f"{group.pairs:,}", *_cells(group.accuracies.get(method) for method in methods))
                for group in self._of(level)
            ]
            title, remarks = ("", self.remarks) if level == "all" else (f"By {level}", ())
            tables += [Table(header, rows, title, remarks)] if rows else []
        return tables

    def record(self, details: bool = False) -> dict[str, Any]:
        """Return plain values, for JSON; with `details`, the scores of every pair as well."""
        groups = [
            {**group._asdict(), "accuracies": {name: each._asdict() for name, each in group.accuracies.items()}}
            for group in self.groups
        ]
        values = {"model": self.model, "pairs": len(self.pairs), "groups": groups, "remarks": list(self.remarks)}
        if details:
            by_pair = zip(*self.scores.values(), strict=True)
            values["scores"] = [
                {"good": pair.good, "bad": pair.bad, "paradigm": pair.paradigm}
                | {name: score and {**score._asdict(), "value": score.value} for name, score in named}
                for pair, named in zip(self.pairs, (zip(self.scores, row, strict=True) for row in by_pair), strict=True)
            ]
        return values

    def _of(self, level: str) -> list[PairGroup]:
        return [group for group in self.groups if group.level == level]


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _cells(accuracies: Iterable[Accuracy | None]) -> Iterator[str]:
    for each in accuracies:
        yield "–" if each is None else f"{each.accuracy:.1%}"
        yield "" if each is None else f"{each.low:.1%}–{each.high:.1%}"


def read_pairs(path: str, encoding: str = "utf-8") -> list[MinimalPair]:
    """Read a table of pairs, or all tables of a folder: BLiMP's columns, `good` and `bad`, or two without a header."""
    try:
        check_encoding(encoding)
    except ValueError as error:
        raise DataError(f"encoding: {error}") from None
    if os.path.isdir(path):
        names = sorted(str(each) for each in Path(path).iterdir() if format_of(str(each)) in TABLES)
        if not names:
            raise DataError(f"{path}: has no tables of pairs ({', '.join(TABLES)}, also compressed)")
    else:
        names = [path]
        if path != "-" and not os.path.exists(path):
            raise DataError(f"{path or repr(path)}: no such file or folder")
        if path != "-" and format_of(path) not in TABLES:
            raise DataError(f"{path}: expected a table of pairs: {', '.join(TABLES)}, also compressed")
    return [pair for name in names for pair in _read_table(name, encoding)]


def _read_table(name: str, encoding: str) -> list[MinimalPair]:
    columns: dict[str, str] = {}
    numbered: tuple[str, ...] = ()
    if format_of(name) in (".csv", ".tsv") and (first := next(iter(records(name, ("0",), encoding=encoding)), None)):
        cells = list(first[1].values())
        names = {*COLUMNS["good"], *COLUMNS["bad"]}
        if not names & {cell.strip().casefold() for cell in cells}:  # no header
            if len(cells) != 2:
                have = f"its first line has {counted(len(cells), 'field')}"
                raise DataError(f"{name}: {have}; name two columns 'good' and 'bad', or leave only two")
            columns, numbered = {"good": "0", "bad": "1"}, ("0", "1")
    rows = records(name, numbered, every=True, encoding=encoding)
    stem = Path(name).name.partition(".")[0]
    pairs = [_pair(row, columns, f"{name}: line {line}") for line, row in rows]
    if not pairs:
        raise DataError(f"{name}: has no pairs of sentences")
    return [pair if pair.paradigm else pair._replace(paradigm=stem) for pair in pairs]


def _pair(row: Any, columns: dict[str, str], where: str) -> MinimalPair:
    """Return the pair of a row; `columns` are found in the first one."""
    if isinstance(row, list) and len(row) == 2:
        row = dict(zip(("good", "bad"), row, strict=True))
    if isinstance(row, Malformed):
        raise DataError(f"{where}: {row.reason}")
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with sentence_good and sentence_bad, or with good and bad")
    if not columns:
        columns |= {key: next((column for column in known if column in row), "") for key, known in COLUMNS.items()}
        for key in ("good", "bad"):
            if not columns[key]:
                raise MissingColumnError.among(key, row, where)
    texts = {key: text_of(row, column, where) for key, column in columns.items() if column}
    pair = check_pair(texts.pop("good"), texts.pop("bad"), where)
    critical = _blimp_words(row) or pair.critical
    for text in (*texts.values(), *chain(*critical or ())):
        _check_text(text, where)
    return pair._replace(**texts, critical=critical, where=where)


def check_pairs(pairs: Iterable[MinimalPair | tuple[str, str]]) -> list[MinimalPair]:
    """Return pairs that were given as (good, bad), and those that are complete as they are."""
    both = [(pair, check_pair(*pair[:2], f"pair {number}")) for number, pair in enumerate(pairs, 1)]
    return [pair if isinstance(pair, MinimalPair) else checked for pair, checked in both]


def check_pair(good: str, bad: str, where: str) -> MinimalPair:
    """Return a pair whose first differing words decide; `where` is its position, for an error."""
    for name, sentence in (("good", good), ("bad", bad)):
        if not isinstance(sentence, str) or not sentence.strip():
            raise DataError(f"{where}: the {name} sentence is empty, or no text")
        _check_text(sentence, where)
    if good == bad:
        raise DataError(f"{where}: both sentences are the same: {good!r:.60}")
    return MinimalPair(good, bad, critical=_first_difference(good, bad))


def _check_text(text: str, where: str) -> None:
    if not is_text(text):
        raise DataError(f"{where}: {text!r:.60} contains a lone surrogate, which is not a character")


def _blimp_words(row: Mapping[str, Any]) -> tuple[CriticalWord, CriticalWord] | None:
    for good, bad in PREFIXES:
        if all(isinstance(row.get(key), str) and row[key] for key in (*good, *bad)):
            return CriticalWord(row[good[0]], row[good[1]]), CriticalWord(row[bad[0]], row[bad[1]])
    return None


def _first_difference(good: str, bad: str) -> tuple[CriticalWord, CriticalWord] | None:
    """Return the first word that differs, after the words that both sentences begin with; None if one lacks it."""
    first, second = good.split(), bad.split()
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if shared is None:
        return None
    prefix = " ".join(first[:shared])
    return CriticalWord(prefix, first[shared]), CriticalWord(prefix, second[shared])


def pair_remarks(
    pairs: Sequence[MinimalPair], lengths: Sequence[tuple[int, int]], unknown: Sequence[Collection[str]]
) -> list[str]:
    """Return what a reader has to know about the pairs: repeated ones, unequal `lengths` in tokens, and each pair's
    `unknown` words, which no token spells."""
    remarks = []
    times, all_pairs = Counter(pair[:3] for pair in pairs), counted(len(pairs), "pair")
    if repeated := sum(n for n in times.values() if n > 1):
        remarks.append(f"{repeated:,} of {all_pairs} occur more than once; every occurrence counts.")
    if unequal := sum(good != bad for good, bad in lengths):
        remarks.append(
            f"In {unequal:,} of {all_pairs}, the sentences differ in the number of tokens; log p is not divided by it."
        )
    if words := list(dict.fromkeys(word for each in unknown for word in each)):
        shown = ", ".join(map(repr, words[:8])) + (", …" if len(words) > 8 else "")
        remarks.append(f"{counted(sum(map(bool, unknown)), 'pair')} with words that no token spells: {shown}")
    return remarks


def check_finite(scores: Iterable[Sequence[float]]) -> None:
    """Raise if a score is NaN."""
    if any(math.isnan(value) for score in scores for value in score):
        raise DataError("the model's probabilities are NaN; its weights may have diverged")
