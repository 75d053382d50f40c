"""How close a text comes to what a person wrote: BLEU and chrF as sacreBLEU counts them, and ROUGE-L.

BLEU and chrF run from 0 to 100, as everybody writes them; BLEU comes with the signature that says how it was counted
(Post 2018). ROUGE-L and the share of exact texts run from 0 to 1.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from weft.evaluate.bootstrap import Array, row_intervals


def translation_metrics(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compare each text with its reference: BLEU (Papineni et al. 2002), chrF (Popović 2015), ROUGE-L, exact match.

    BLEU counts phrases of up to four words. Where no reference has so many it would be 0 for perfect texts, and is left
    out.
    """
    bleu, chrf = BLEU(force=True), CHRF()
    pairs = list(zip(texts, references, strict=True))
    # what sacreBLEU itself resamples: a row of counts for each text, whose sums the score is made of
    counts = [np.array(each._extract_corpus_statistics(list(texts), [list(references)])) for each in (bleu, chrf)]
    longest = counts[0][:, 1].max()  # words of a reference, as BLEU counts them
    signature = {"bleu_signature": str(bleu.get_signature())} if longest >= bleu.max_ngram_order else {}
    exact = np.array([(rouge_l(text, reference), text == reference) for text, reference in pairs], dtype=np.float64)

    def measure(drawn: Array) -> dict[str, float]:
        sums = ((drawn @ each).astype(np.int64).tolist() for each in counts)
        scores = [each._compute_score_from_stats(some).score for each, some in zip((bleu, chrf), sums, strict=True)]
        rouge, same = (drawn @ exact / drawn.sum()).tolist()
        phrases = {"bleu": float(scores[0])} if signature else {}
        return {**phrases, "chrf": float(scores[1]), "rouge_l": rouge, "exact": same}

    return {
        **measure(np.ones(len(pairs))),
        **signature,
        "rows": len(pairs),
        "intervals": row_intervals(measure, len(pairs)),
    }


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, §3, β = 1): lower case, no punctuation, no stemming."""
    written, wanted = (re.findall(r"[^\W_]+", one.lower()) for one in (text, reference))
    common = longest_common_subsequence(written, wanted)
    return 2 * common / (len(written) + len(wanted)) if common else 0.0


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words stand in both in the same order, by one addition of long numbers a word (Hyyrö 2004)."""
    places: dict[str, int] = {}  # a bit for each word of `one`
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(one)) - 1
    row = full  # a 0 at a place where the subsequence grows
    for word in other:
        met = row & places.get(word, 0)
        row = ((row + met) | (row - met)) & full
    return len(one) - row.bit_count()
