"""lectures/ngram.py gives the probabilities of weft's n-gram models."""

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.later import Later
from tests.lectures.textbook.lecture import load
from tests.pairwise import pairwise as combined

from weft.models.ngram import NGram
from weft.models.presets import preset
from weft.models.smoothing import KneserNey, MaximumLikelihood, ModifiedKneserNey, Smoothing

stats = Later("scipy.stats")
ngram = load("ngram")


def random_text(seed: int) -> str:
    """Text with frequent and rare words, so that n-grams occur once, twice, three times and more."""
    rng = random.Random(seed)
    return " ".join(f"w{min(int(rng.paretovariate(0.8)), 40)}" for _ in range(1500))


TEXTS = {
    "cows": ngram.SNIPPETS.split(" / "),
    "unicode": ["кот ест рыбу , кот ест мясо", "猫 は 魚 を 食べ る", "le chat mange du poisson 🐟 🐟 🐟", "кот"],
    "once": ["a b c d e f g"],
    "repeated": ["a a a a a a a b a a a"],
    "long": [random_text(0), random_text(1)],
}


def fitted(texts: list[tuple[str, ...]], words: list[str], order: int, smoothing: Smoothing) -> NGram:
    ids = {word: id for id, word in enumerate(words)}
    tokens = np.array([ids[word] for text in texts for word in text])
    begins = np.cumsum([0] + [len(text) for text in texts])[:-1]
    model = NGram(preset("ngram-3").replace(vocab_size=len(words), order=order, smoothing=smoothing))
    model.fit(tokens, begins)
    return model


@pytest.mark.parametrize(
    ("name", "order", "smoothing"),
    combined(TEXTS, [1, 2, 3, 5], [MaximumLikelihood(), KneserNey(), ModifiedKneserNey()]),
    ids=lambda value: getattr(value, "kind", value),
)
def test_probabilities_are_wefts(name: str, order: int, smoothing: Smoothing) -> None:
    """p of all words in seen and unseen contexts; weft stores log p in float32."""
    texts = [tuple(text.split()) for text in TEXTS[name]]
    words = sorted({word for text in texts for word in text} | {"<unk>"})
    model = fitted(texts, words, order, smoothing)
    if isinstance(smoothing, MaximumLikelihood):
        ours = ngram.MaximumLikelihood(texts, order)
    else:
        rule = ngram.one_discount if isinstance(smoothing, KneserNey) else ngram.three_discounts
        ours = ngram.KneserNey(texts, order, len(words), rule)
    rng = random.Random(0)
    read = [*texts[0][:12], *rng.choices(words, k=12)]
    rows = model(torch.tensor([[words.index(word) for word in read]]))[0].double()
    for t, row in enumerate(rows):
        found = [ours.p(word, tuple(read[: t + 1])) for word in words]
        assert sum(found) == pytest.approx(1.0)
        for p, log_p in zip(found, row.tolist(), strict=True):
            assert (math.log(p) if p else -math.inf) == pytest.approx(log_p, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("order", [1, 3])
def test_perplexity_is_wefts(order: int) -> None:
    train, held_out = (tuple(text.split()) for text in TEXTS["long"])
    words = sorted({*train, *held_out})
    model = fitted([train], words, order, KneserNey())
    scores = model.log_prob(np.array([words.index(word) for word in held_out]))
    found = ngram.perplexity(ngram.score(ngram.KneserNey([train], order, len(words)).p, held_out))
    assert found == pytest.approx(math.exp(-float(np.mean(scores))), rel=1e-5)


def test_the_slides_numbers() -> None:
    cows = ngram.MaximumLikelihood([tuple(snippet.split()) for snippet in ngram.SNIPPETS.split(" / ")], 3)
    expected = {"corn": 4, "grass": 3, "hay": 2, "if": 1, "which": 1, "moo": 0}
    assert {w: cows.p(w, ("cows", "eat")) for w in expected} == {w: c / 11 for w, c in expected.items()}
    assert round(ngram.perplexity([1 / 4, 1 / 3, 1 / 4, 1 / 3]), 3) == 3.464
    assert ngram.perplexity([0.5, 0.0]) == math.inf


def test_sampling_follows_p() -> None:
    texts = [tuple("abacabbcaccba")]
    model, vocabulary = ngram.KneserNey(texts, 2, 3), ["a", "b", "c"]
    written = ngram.sample(model.p, vocabulary, random.Random(0), length=6000)
    pairs = Counter(pairwise(written[1:]))
    for h in vocabulary:
        counts = [pairs[h, w] for w in vocabulary]
        assert stats.chisquare(counts, [sum(counts) * model.p(w, (h,)) for w in vocabulary]).pvalue > 1e-3
