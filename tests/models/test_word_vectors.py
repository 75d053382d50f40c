"""word2vec and GloVe: the C code against the readable updates, these against autograd, and what vectors learn."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.pairwise import each_once
from torch.nn import functional as F

from weft.errors import DataError
from weft.models import word_kernels
from weft.models.config import GloVe, Word2Vec
from weft.models.glove import GloVeTraining, cooccurrences
from weft.models.word2vec import RandomBits, Word2VecTraining, alias_table, keep_thresholds

V = 30
needs_compiler = pytest.mark.skipif(word_kernels.library() is None, reason="needs a C compiler")


def text(tokens: int = 800, seed: int = 0) -> NDArray[np.int32]:
    """Words by Zipf's law, in documents of 100."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.3, tokens) - 1, V - 1).astype(np.int32)
    words[100::101] = -1
    return words


def train(training: Any, epochs: int, monkeypatch: pytest.MonkeyPatch | None = None, threads: int = 1) -> list[float]:
    """Train, in Python if `monkeypatch` is given; return the losses."""
    if monkeypatch is not None:
        monkeypatch.setattr(word_kernels, "library", lambda: None)
    losses = [training.epoch(epoch, threads=threads, tick=lambda done: None) for epoch in range(epochs)]
    if monkeypatch is not None:
        monkeypatch.undo()
    return losses


@needs_compiler
@pytest.mark.parametrize(("architecture", "width"), each_once(["skip-gram", "cbow"], [5, 16, 33]))
def test_word2vec_in_c_equals_the_readable_updates(
    architecture: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Word2Vec(vocab_size=V, d_model=width, architecture=architecture, window=3, subsample=0.05, lr=0.1)
    fast, plain = (Word2VecTraining(settings, text(), epochs=2, seed=3) for _ in range(2))
    np.testing.assert_allclose(train(fast, 2), train(plain, 2, monkeypatch), rtol=1e-4)
    for name, table in fast.state.items():
        np.testing.assert_allclose(table, plain.state[name], rtol=2e-3, atol=2e-5)


@needs_compiler
def test_glove_in_c_equals_the_readable_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = (GloVeTraining(GloVe(vocab_size=V, d_model=20), text(), seed=3) for _ in range(2))
    np.testing.assert_allclose(train(fast, 2), train(plain, 2, monkeypatch), rtol=1e-4)
    for name, table in fast.state.items():
        np.testing.assert_allclose(table, plain.state[name], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("inputs", [[4], [4, 7, 9]])
def test_word2vec_descends_the_gradient_of_its_loss(inputs: list[int]) -> None:
    """One prediction against autograd. A window's words each get the whole gradient of their mean (§ authors' code)."""
    training = Word2VecTraining(Word2Vec(vocab_size=V, d_model=16), text(), epochs=1, seed=0)
    training.context[:] = np.random.default_rng(1).normal(size=training.context.shape)
    embedding, context = (torch.tensor(table, requires_grad=True) for table in training.state.values())
    targets = [2, 11, 12]
    hidden = embedding[inputs].mean(dim=0)
    signs = torch.tensor([1.0, -1.0, -1.0])
    loss = -F.logsigmoid(signs * (context[targets] @ hidden)).sum()
    loss.backward()
    assert embedding.grad is not None
    assert context.grad is not None
    assert training._update(inputs, targets, 0.1) == pytest.approx(float(loss.detach()), rel=1e-5)
    expected = embedding.detach() - 0.1 * len(inputs) * embedding.grad
    np.testing.assert_allclose(training.embedding, expected, atol=1e-6)
    np.testing.assert_allclose(training.context, context.detach() - 0.1 * context.grad, atol=1e-6)


def test_glove_takes_adagrad_steps_on_its_loss() -> None:
    training = GloVeTraining(GloVe(vocab_size=V, d_model=16, lr=0.05), text(), seed=0)
    state = {name: torch.tensor(table, requires_grad=True) for name, table in training.state.items()}
    biases = state["word_biases"][4, 0] + state["context_biases"][7, 0]
    loss = 0.3 * (state["words"][4] @ state["contexts"][7] + biases - 2.5) ** 2 / 2
    loss.backward()
    assert training._update(4, 7, 2.5, weight=0.3) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name in ("words", "contexts"):
        gradient, squares = state[name].grad, training.state[f"{name[:-1]}_squares"]
        assert gradient is not None
        np.testing.assert_allclose(training.state[name], state[name].detach() - 0.05 * gradient, atol=1e-6)
        np.testing.assert_allclose(squares, 1 + (0.05 * gradient) ** 2, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("counted", [64, 1 << 20])
def test_cooccurrences_are_those_of_a_double_loop(window: int, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.models.glove.COUNTED", counted)  # many merged parts, or one
    words, expected = text(600).tolist(), defaultdict[int, float](float)
    for first, a in enumerate(words):
        for distance in range(1, window + 1):
            between = words[first : first + distance + 1]
            if len(between) > distance and -1 not in between:
                b = between[-1]
                expected[min(a, b) * V + max(a, b)] += 1 / distance
    keys, counts = cooccurrences(text(600), V, window, tick=lambda done: None)
    assert keys.tolist() == sorted(expected)
    np.testing.assert_allclose(counts, [expected[key] for key in sorted(expected)])


def test_alias_table_draws_by_weight() -> None:
    weights = np.array([5.0, 0.0, 1.0, 2.5, 0.01, 9.0])
    threshold, alias = alias_table(weights)
    kept = threshold / (2**32 - 1)
    drawn = kept + np.bincount(alias, weights=1 - kept, minlength=len(weights))
    np.testing.assert_allclose(drawn / len(weights), weights / weights.sum(), atol=1e-9)


def test_frequent_words_are_left_out_more_often() -> None:
    counts = np.array([900.0, 99.0, 1.0])
    kept = keep_thresholds(counts, 0.01) / (2**32 - 1)
    frequency = counts / counts.sum()
    np.testing.assert_allclose(kept, np.minimum(1, (np.sqrt(frequency / 0.01) + 1) * 0.01 / frequency), rtol=1e-6)
    assert (keep_thresholds(counts, 0.0) == 2**32 - 1).all()


def test_random_bits_are_even_and_streams_differ() -> None:
    first, second = ([RandomBits(7, stream).draw() for _ in range(1)] for stream in (0, 1))
    assert first != second
    rng = RandomBits(1, 2)
    values = np.array([rng.draw() >> 32 for _ in range(4000)]) / 2**32
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(values.var() - 1 / 12) < 0.01


@pytest.mark.parametrize(
    "settings", [Word2Vec(vocab_size=8, d_model=12, subsample=0.0, lr=0.1), GloVe(vocab_size=8, d_model=12)]
)
def test_words_of_one_topic_end_up_near_each_other(settings: Any) -> None:
    """Documents use words 0 … 3 or 4 … 7."""
    rng = np.random.default_rng(0)
    documents = [np.append(rng.integers(0, 4, 40) + 4 * (n % 2), -1) for n in range(100)]
    words = np.concatenate(documents).astype(np.int32)
    keyed: dict[str, Any] = {"epochs": 5} if isinstance(settings, Word2Vec) else {}
    make: Any = Word2VecTraining if isinstance(settings, Word2Vec) else GloVeTraining
    training = make(settings, words, seed=0, **keyed)
    losses = train(training, 5)
    assert losses[-1] < losses[0]
    vectors = training.vectors / np.linalg.norm(training.vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    same = np.add.outer(np.arange(8) // 4, np.arange(8) // 4) != 1
    assert cosines[same].mean() > cosines[~same].mean() + 0.3


@pytest.mark.parametrize("words", [[], [-1, -1], [3] * 30 + [-1], [1, 2, 3]])
def test_too_small_a_text_is_refused(words: list[int]) -> None:
    with pytest.raises(DataError, match="too few to learn vectors from"):
        Word2VecTraining(Word2Vec(vocab_size=V), np.array(words, dtype=np.int32), epochs=1, seed=0)
