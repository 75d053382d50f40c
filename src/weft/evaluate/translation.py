"""Similarity of texts to references: BLEU and chrF as sacreBLEU computes them, and ROUGE-L.

BLEU and chrF are in 0 … 100, as is customary; BLEU comes with sacreBLEU's signature of how it was computed (Post 2018).
ROUGE-L and the share of exact matches are in 0 … 1.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from weft.evaluate.bootstrap import Array, row_intervals


def translation_metrics(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compare each text with its reference: BLEU (Papineni et al. 2002), chrF (Popović 2015), ROUGE-L, exact match."""
    bleu, chrf = BLEU(force=True), CHRF()
    pairs = list(zip(texts, references, strict=True))
    # the statistics that sacreBLEU itself resamples: a row of counts per text, whose sums determine the score
    counts = [np.array(each._extract_corpus_statistics(list(texts), [list(references)])) for each in (bleu, chrf)]
    # BLEU counts 4-grams of words; with shorter references it would be 0 even for perfect texts, and is left out
    longest = counts[0][:, 1].max()
    signature = {"bleu_signature": str(bleu.get_signature())} if longest >= bleu.max_ngram_order else {}
    matches = np.array([(rouge_l(text, reference), text == reference) for text, reference in pairs], dtype=np.float64)

    def measure(weights: Array) -> dict[str, float]:
        sums = ((weights @ each).astype(np.int64).tolist() for each in counts)
        scores = [each._compute_score_from_stats(stats).score for each, stats in zip((bleu, chrf), sums, strict=True)]
        rouge, exact = (weights @ matches / weights.sum()).tolist()
        bleu_score = {"bleu": float(scores[0])} if signature else {}
        return {**bleu_score, "chrf": float(scores[1]), "rouge_l": rouge, "exact": exact}

    rows = len(pairs)
    return {**measure(np.ones(rows)), **signature, "rows": rows, "intervals": row_intervals(measure, rows)}


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, §3, β = 1): lower case, no punctuation, no stemming."""
    words, expected = (re.findall(r"[^\W_]+", each.lower()) for each in (text, reference))
    common = longest_common_subsequence(words, expected)
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence of words, with one big-integer addition per word (Hyyrö 2004)."""
    masks: dict[str, int] = {}  # word → a bit for each of its positions in `first`
    for position, word in enumerate(first):
        masks[word] = masks.get(word, 0) | 1 << position
    full = (1 << len(first)) - 1
    row = full  # a 0 bit where the subsequence grows
    for word in second:
        matches = row & masks.get(word, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()
