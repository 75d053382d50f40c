"""N-gram models against plain dictionaries, nltk, and the stepping contract."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tests.later import Later
from tests.models.contract import PaddedSource, check_causal, check_rows_are_independent, check_step_equals_forward

from weft.errors import ModelError
from weft.models.config import NGram
from weft.models.ngram import NGram as Model
from weft.models.ngram_counts import Documents, Ints, count_ngrams, document_starts
from weft.models.ngram_smoothing import discounts
from weft.models.smoothing import AddK, KneserNey, MaximumLikelihood, ModifiedKneserNey, Smoothing, StupidBackoff

peers = Later("nltk.lm")

SMOOTHINGS: list[Smoothing] = [MaximumLikelihood(), AddK(k=0.3), StupidBackoff(alpha=0.4)]
SMOOTHINGS += [KneserNey(discount=0.7), KneserNey(), ModifiedKneserNey()]
KINDS = [f"{s.kind}{'' if getattr(s, 'discount', 1) else '-estimated'}" for s in SMOOTHINGS]
V = 7
Words = tuple[int, ...]


def text(seed: int = 0, sizes: Sequence[int] = (40, 1, 25, 2, 60), words: int = V - 1) -> list[list[int]]:
    """Documents with repetitions; the last word of the vocabulary never occurs."""
    rng = np.random.default_rng(seed)
    return [[int(w) for w in np.minimum(rng.geometric(0.4, size) - 1, words - 1)] for size in sizes]


def joined(documents: list[list[int]]) -> tuple[Ints, Ints]:
    """Concatenated documents, and the index where each begins."""
    tokens = np.array([w for document in documents for w in document], dtype=np.uint16)
    return tokens, np.cumsum([0] + [len(document) for document in documents])[:-1]


def fitted(documents: list[list[int]], order: int, smoothing: Smoothing, vocab_size: int = V) -> Model:
    model = Model(NGram(vocab_size=vocab_size, order=order, smoothing=smoothing))
    model.fit(*joined(documents))
    return model


def rows(model: Model, contexts: list[Words]) -> NDArray[np.float64]:
    """Probabilities (contexts, vocabulary) after each context, from `head`."""
    width, missing = model.config.order - 1, model.config.vocab_size
    padded = [[missing] * (width - len(c)) + list(c) for c in contexts]
    logits = model.head(torch.tensor(padded, dtype=torch.long).view(len(contexts), 1, width))
    return logits[:, 0].double().exp().numpy()


def every_context(order: int) -> list[Words]:
    return [c for length in range(order) for c in product(range(V), repeat=length)]


class Dictionaries:
    """The formulas over dictionaries of counts: slow and plain, without any of the model's code."""

    def __init__(self, documents: list[list[int]], order: int, vocab_size: int):
        self.order, self.vocab_size = order, vocab_size
        self.counts: Counter[Words] = Counter()
        before: dict[Words, set[int]] = defaultdict(set)
        for document in documents:
            for n in range(1, order + 1):
                for i in range(len(document) - n + 1):
                    ngram = tuple(document[i : i + n])
                    self.counts[ngram] += 1
                    before[ngram].add(document[i - 1] if i else -1)  # −1: the document begins here
        self.varieties = Counter({ngram: len(words) for ngram, words in before.items()})

    def after(self, counts: Counter[Words], context: Words) -> dict[int, int]:
        return {w: counts[(*context, w)] for w in range(self.vocab_size) if counts[(*context, w)]}

    def mle(self, context: Words) -> list[float]:
        seen = self.after(self.counts, context)
        if not seen:
            return self.mle(context[1:])
        return [seen.get(w, 0) / sum(seen.values()) for w in range(self.vocab_size)]

    def add_k(self, context: Words, k: float) -> list[float]:
        seen = self.after(self.counts, context)
        total = sum(seen.values()) + k * self.vocab_size
        return [(seen.get(w, 0) + k) / total for w in range(self.vocab_size)]

    def backoff_scores(self, context: Words, alpha: float) -> list[float]:
        lower = self.backoff_scores(context[1:], alpha) if context else [1 / self.vocab_size] * self.vocab_size
        seen = self.after(self.counts, context)
        return [seen[w] / sum(seen.values()) if w in seen else alpha * lower[w] for w in range(self.vocab_size)]

    def kneser_ney(self, context: Words, discount: float | None, modified: bool = False) -> list[float]:
        n = len(context) + 1
        uniform = [1 / self.vocab_size] * self.vocab_size
        lower = self.kneser_ney(context[1:], discount, modified) if context else uniform
        counts = self.counts if n == self.order else self.varieties
        seen = self.after(counts, context)
        if not seen:
            return lower
        n1, n2, n3, n4 = (sum(len(g) == n and c == times for g, c in counts.items()) for times in (1, 2, 3, 4))
        Y = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        D = [0.0, *[Y if discount is None else discount] * 3]
        if modified and n1 and n2 and n3:
            three = [1 - 2 * Y * n2 / n1, 2 - 3 * Y * n3 / n2, 3 - 4 * Y * n4 / n3]
            D = [0.0, *three] if min(three) > 0 else D
        total = sum(seen.values())
        gamma = sum(D[min(3, count)] for count in seen.values()) / total
        kept = [max(seen.get(w, 0) - D[min(3, seen.get(w, 0))], 0) / total for w in range(self.vocab_size)]
        return [kept[w] + gamma * lower[w] for w in range(self.vocab_size)]

    def row(self, smoothing: Smoothing, context: Words) -> list[float]:
        match smoothing:
            case MaximumLikelihood():
                return self.mle(context)
            case AddK():
                return self.add_k(context, smoothing.k)
            case StupidBackoff():
                scores = self.backoff_scores(context, smoothing.alpha)
                return [score / sum(scores) for score in scores]
            case KneserNey():
                return self.kneser_ney(context, smoothing.discount)
            case ModifiedKneserNey():
                return self.kneser_ney(context, None, modified=True)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=KINDS)
def test_every_context_has_the_distribution_of_the_formula(smoothing: Smoothing, order: int) -> None:
    """Contexts may be seen or unseen, full or short."""
    documents = text()
    model, reference = fitted(documents, order, smoothing), Dictionaries(documents, order, V)
    contexts = every_context(order)
    got = rows(model, contexts)
    expected = np.array([reference.row(smoothing, c) for c in contexts])
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(got.sum(1), 1.0, atol=1e-5)


@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=KINDS)
def test_scores_equal_the_heads(smoothing: Smoothing, monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_prob` is the head's row at each token's id, for documents and blocks of any size."""
    monkeypatch.setattr("weft.models.ngram.CHUNK", 13)
    monkeypatch.setattr("weft.models.ngram_counts.BLOCK", 5)
    model = fitted(text(), 4, smoothing)
    tokens, begins = joined(text(seed=8, words=V))
    got = model.log_prob(tokens, begins)
    expected = []
    for document in text(seed=8, words=V):
        contexts = [tuple(document[max(0, i - 3) : i]) for i in range(len(document))]
        expected += [row[w] for row, w in zip(rows(model, contexts), document, strict=True)]
    np.testing.assert_allclose(np.exp(got.astype(np.float64)), expected, rtol=1e-5, atol=1e-9)
    assert got.dtype == np.float32


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 4), max_size=9), max_size=6), st.integers(1, 12), st.integers(1, 4))
def test_chunks_do_not_change_the_counts(documents: list[list[int]], chunk: int, order: int) -> None:
    """The trie holds each n-gram's count, for chunks of any size and any merging."""
    tokens, begins = joined([[0], *documents])
    ticks: list[int] = []
    text = Documents(tokens, document_starts(len(tokens), begins))
    trie = count_ngrams(text, 5, order, tick=ticks.append, chunk=chunk)
    got: dict[Words, int] = {(int(w),): int(c) for w, c in zip(trie[0].words, trie[0].counts, strict=True) if c}
    prefixes: list[Words] = [(w,) for w in range(5)]
    for above, level in pairwise(trie):
        parents = np.repeat(np.arange(len(above)), np.diff(above.starts))
        prefixes = [(*prefixes[p], int(w)) for p, w in zip(parents, level.words, strict=True)]
        assert prefixes == sorted(set(prefixes))
        got |= {ngram: int(c) for ngram, c in zip(prefixes, level.counts, strict=True)}
    assert got == Dictionaries([[0], *documents], order, 5).counts
    assert sum(ticks) == len(tokens) * order


def grams(documents: list[list[int]], order: int, opened: bool) -> list[tuple[str, ...]]:
    """All n-grams in nltk's form; if `opened`, also those that begin with the start of a document."""
    found = []
    for document in documents:
        words = ["<s>", *map(str, document)] if opened else list(map(str, document))
        spans = [(i, n) for n in range(1, order + 1) for i in range(len(words) - n + 1)]
        found += [tuple(words[i : i + n]) for i, n in spans if words[i : i + n] != ["<s>"]]
    return found


def nltk_scores(peer: Any, context: Words) -> NDArray[np.float64]:
    return np.array([peer.score(str(w), [str(c) for c in context]) for w in range(V)])


@pytest.mark.parametrize(
    ("smoothing", "peer"),
    [
        (MaximumLikelihood(), lambda: peers.MLE(3)),
        (AddK(k=0.3), lambda: peers.Lidstone(0.3, 3)),
        (StupidBackoff(alpha=0.3), lambda: peers.StupidBackoff(0.3, 3)),
    ],
    ids=["mle", "add-k", "stupid-backoff"],
)
def test_equals_nltk(smoothing: Smoothing, peer: Callable[[], Any]) -> None:
    """nltk's MLE is zero after unseen contexts, and it does not normalise backoff."""
    documents = [*text(), [V - 1]]
    model, nltk = fitted(documents, 3, smoothing), peer()
    nltk.fit([grams(documents, 3, opened=False)], [str(w) for w in range(V)])
    nltk.vocab.unk_label = "0"  # otherwise nltk counts the label of unknown words as a word
    compared = 0
    for context in every_context(3):
        scores = nltk_scores(nltk, context)
        if scores.sum():
            np.testing.assert_allclose(rows(model, [context])[0], scores / scores.sum(), rtol=1e-5, atol=1e-9)
            compared += 1
    assert compared > 20


def test_kneser_ney_equals_nltk() -> None:
    """nltk ends in undiscounted unigrams, weft in the uniform distribution: equal if all words have equal counts.

    Each word begins one document and follows each word, so it has V + 1 distinct predecessors. A beginning counts as a
    predecessor, so nltk gets the n-grams that begin with `<s>`, but none that end with it.
    """
    documents = [[w, *row] for w, row in enumerate(text(seed=3, sizes=[30] * V, words=V))]
    documents[0] += [w for pair in product(range(V), repeat=2) for w in pair]
    model = fitted(documents, 3, KneserNey(discount=0.6))
    nltk = peers.KneserNeyInterpolated(3, discount=0.6)
    nltk.fit([grams(documents, 3, opened=True)], [str(w) for w in range(V)])
    for context in every_context(3):
        np.testing.assert_allclose(rows(model, [context])[0], nltk_scores(nltk, context), rtol=1e-5)


def test_discounts_are_estimated_from_the_counts() -> None:
    """Ten bigrams seen once and five seen twice: D = 10 / (10 + 2 · 5) = 1/2, the mass of the unseen words."""
    documents = [[w, w] for w in range(10)] + [[w, w + 1] for w in range(5) for _ in range(2)]
    model = fitted(documents, 2, KneserNey(), vocab_size=12)
    lower = rows(model, [()])[0]
    row = rows(model, [(7,)])[0]  # followed by 7, once
    np.testing.assert_allclose(row, 0.5 * (np.arange(12) == 7) + 0.5 * lower, rtol=1e-6)
    assert lower[11] > 0


def test_three_discounts() -> None:
    """Y = 8/16, D₁ = 1 − 2·½·4/8, D₂ = 2 − 3·½·2/4, D₃₊ = 3 − 4·½·1/2; too few counts have a single discount."""
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] + [9] * 3)
    assert discounts(ModifiedKneserNey(), counts) == pytest.approx((0.5, 1.25, 2.0))
    assert discounts(ModifiedKneserNey(), np.array([1, 1, 2])) == pytest.approx((0.5, 0.5, 0.5))
    documents = text(sizes=(300, 500))
    one, three = (rows(fitted(documents, 3, kind), [(0, 1)]) for kind in (KneserNey(), ModifiedKneserNey()))
    assert not np.allclose(one, three)


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("smoothing", [AddK(), KneserNey()], ids=["add-k", "kneser-ney"])
def test_ngrams_keep_the_contract(smoothing: Smoothing, order: int) -> None:
    model = fitted(text(), order, smoothing)
    check_step_equals_forward(model, V)
    check_rows_are_independent(model, V)
    if order > 1:
        check_causal(model, V)


def test_contexts_do_not_cross_documents() -> None:
    """A word of another document is replaced by the id that no token has."""
    model = fitted(text(), 3, KneserNey())
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    together = model.features(tokens)
    assert together.tolist() == [[[V, 1], [1, 2], [2, 3], [3, 4], [4, 5]]]
    apart = model.features(tokens, documents=torch.tensor([[0, 0, 1, 1, 1]]))
    assert apart.tolist() == [[[V, 1], [1, 2], [V, 3], [3, 4], [4, 5]]]


def test_a_new_model_loads_fitted_tables(tmp_path: Path) -> None:
    model = fitted(text(), 3, KneserNey())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = Model(NGram(vocab_size=V, order=3))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    tokens = joined(text(seed=1))[0]
    assert np.array_equal(model.log_prob(tokens), other.log_prob(tokens))
    assert model.entries == other.entries


def test_inconsistent_tables_are_refused() -> None:
    state = fitted(text(), 3, KneserNey()).state_dict()
    wrong = {**state, "starts_1": state["starts_1"] + 1}
    with pytest.raises(ModelError, match="tables of order 1"):
        Model(NGram(vocab_size=V, order=3)).load_state_dict(wrong)
    with pytest.raises(ModelError, match="order 3 over 8 words"):
        Model(NGram(vocab_size=8, order=3)).load_state_dict(state)


def test_documents_shorter_than_the_order_are_counted() -> None:
    """Without n-grams of the highest order, shorter ones are used."""
    model = fitted([[0, 1], [0, 1], [2]], 4, KneserNey(discount=0.5), vocab_size=3)
    assert model.entries == [3, 1, 0, 0]
    assert rows(model, [(0,)])[0].argmax() == 1
    np.testing.assert_allclose(rows(model, [(), (0,), (1, 0), (2, 1, 0)]).sum(1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, 1], "2 tokens are too few to count n-grams of order 3"),
        ([0, 1, V, 2], "token id 7 is outside the vocabulary of 7"),
        ([0, 1, -2, 2], "token id -2 is outside"),
    ],
)
def test_invalid_tokens_cannot_be_counted(tokens: list[int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Model(NGram(vocab_size=V, order=3)).fit(np.array(tokens))


def test_a_model_without_counts_is_refused() -> None:
    model = Model(NGram(vocab_size=V, order=3))
    log_prob, logits = lambda: model.log_prob(np.array([1, 2])), lambda: model(torch.tensor([[1, 2]]))
    for use in (log_prob, logits, lambda: model.start(1, 4), lambda: model.entries):
        with pytest.raises(ModelError, match="has no counts yet"):
            use()


def test_invalid_inputs_are_refused() -> None:
    model = fitted(text(), 3, KneserNey())
    with pytest.raises(ModelError, match="token id 7 is outside"):
        model.log_prob(np.array([1, 7]))
    with pytest.raises(ModelError, match="token id 9 is outside"):
        model(torch.tensor([[9]]))
    with pytest.raises(ModelError, match="cannot read a source"):
        model.start(1, 4, PaddedSource(torch.tensor([[1]])))
