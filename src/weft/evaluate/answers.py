"""Short answers to questions against those that people gave: exact match and F1 of SQuAD (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import DataError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Answered:
    """What came of answering; both figures run from 0 to 1."""

    exact: float
    f1: float
    count: int

    def metrics(self) -> dict[str, float]:
        """The metrics by name, as logs and tables show them."""
        return {"exact": self.exact, "f1": self.f1}


def answered(told: Sequence[str], right: Sequence[str | Sequence[str]]) -> Answered:
    """Compare answers with the right one, or the best of several right ones. No right answer at all is right if empty.

    The last is SQuAD 2.0's rule for questions that can't be answered.
    """
    if len(told) != len(right):
        raise DataError(f"{len(told)} answers to {len(right)} questions; each needs one")
    if not told:
        raise DataError("no answers to measure")
    golds = [[one] if isinstance(one, str) else list(one) or [""] for one in right]
    exact = sum(max(exact_match(a, gold) for gold in several) for a, several in zip(told, golds, strict=True))
    overlap = sum(max(f1(a, gold) for gold in several) for a, several in zip(told, golds, strict=True))
    return Answered(exact / len(told), overlap / len(told), len(told))


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(told: str, right: str) -> float:
    """1 if both are the same once normalised, else 0."""
    return float(normalised(told) == normalised(right))


def f1(told: str, right: str) -> float:
    """The harmonic mean of precision and recall over words; an empty answer is right where the right one is empty."""
    said, wanted = normalised(told).split(), normalised(right).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))
