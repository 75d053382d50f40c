"""How near a text comes to what a person wrote: BLEU and chrF as sacreBLEU counts them, and ROUGE-L.

BLEU and chrF run from 0 to 100, as everybody writes them, and come with the signature that says how they were counted
(Post 2018). ROUGE-L and the share of exact texts run from 0 to 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, DataError, suggestion

References = Sequence[str | Sequence[str]]  # for each text one reference, or several


@dataclass(frozen=True)
class Scored:
    """A corpus score and the signature that lets others count the same."""

    score: float
    signature: str


@dataclass(frozen=True)
class Translated:
    """What came of translating."""

    bleu: Scored
    chrf: Scored
    rouge_l: float
    exact: float
    count: int

    def metrics(self) -> dict[str, float]:
        """The metrics by name, as logs and tables show them."""
        return {"bleu": self.bleu.score, "chrf": self.chrf.score, "rouge_l": self.rouge_l, "exact": self.exact}


def translated(texts: Sequence[str], references: References, tokenize: str = "13a") -> Translated:
    """Compare texts with their references; `tokenize` is sacreBLEU's name of how words are told apart."""
    listed = _listed(texts, references)
    exact = sum(text in several for text, several in zip(texts, listed, strict=True)) / len(texts)
    return Translated(
        bleu(texts, references, tokenize), chrf(texts, references), rouge_l(texts, references), exact, len(texts)
    )


def bleu(texts: Sequence[str], references: References, tokenize: str = "13a") -> Scored:
    """BLEU of a corpus (Papineni et al. 2002)."""
    from sacrebleu.metrics.bleu import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise ConfigError(f"tokenize = '{tokenize}': {suggestion(tokenize, BLEU.TOKENIZERS)}")
    return _corpus_score(BLEU(tokenize=tokenize, force=True), texts, references)


def chrf(texts: Sequence[str], references: References) -> Scored:
    """chrF of a corpus: F2 of character 6-grams (Popović 2015)."""
    from sacrebleu.metrics.chrf import CHRF

    return _corpus_score(CHRF(), texts, references)


def _corpus_score(metric: Any, texts: Sequence[str], references: References) -> Scored:
    listed = _listed(texts, references)
    most = max(len(several) for several in listed)
    # sacreBLEU wants the first reference of every text, then the second of every text, and None where there is none
    streams = [[several[n] if n < len(several) else None for several in listed] for n in range(most)]
    score = metric.corpus_score(list(texts), streams).score
    return Scored(float(score), str(metric.get_signature()))


def rouge_l(texts: Sequence[str], references: References) -> float:
    """The mean of ROUGE-L over texts, each against its best reference."""
    listed = _listed(texts, references)
    best = [max(rouge_l_one(text, r) for r in several) for text, several in zip(texts, listed, strict=True)]
    return sum(best) / len(best)


def rouge_l_one(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, §3, β = 1): lower case, no punctuation, no stemming."""
    said, wanted = _words(text), _words(reference)
    common = longest_common_subsequence(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words stand in both in the same order.

    One bit a word of `one`; each word of `other` is one addition of long numbers (Hyyrö 2004).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full  # a 0 at a place where the subsequence grows
    for word in other:
        met = row & places.get(word, 0)
        row = ((row + met) | (row - met)) & full
    return len(one) - row.bit_count()


def _listed(texts: Sequence[str], references: References) -> list[list[str]]:
    """Every text's references as a list."""
    if len(texts) != len(references):
        raise DataError(f"{len(texts)} texts, but references for {len(references)}; each text needs its own")
    if not texts:
        raise DataError("no texts to compare with references")
    listed = [[one] if isinstance(one, str) else list(one) for one in references]
    for number, several in enumerate(listed, 1):
        if not several:
            raise DataError(f"text {number} has no reference")
    return listed
