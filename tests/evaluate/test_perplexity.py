"""Scores are sums over every token, once, whatever the windows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from weft.errors import DataError
from weft.evaluate.perplexity import Reading, Score, counted_scores, spans, token_scores
from weft.models.build import build
from weft.models.config import Decoder, NGram, Recurrent
from weft.nn.config import Attention, Gated, RMSNorm
from weft.nn.position_config import Rotary


class Text:
    """A text as tokens in memory."""

    def __init__(self, ids: list[int], size: int | None = None, documents: list[int] | None = None):
        self.ids = np.array(ids)
        self.bytes = len(ids) if size is None else size
        self.numbers = np.zeros(len(ids), dtype=np.int64) if documents is None else np.array(documents)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, length: int) -> np.ndarray:
        assert start >= 0
        assert start + length <= len(self.ids)
        return self.ids[start : start + length]

    def documents(self, start: int, length: int) -> np.ndarray:
        return self.numbers[start : start + length]


def decoder() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Decoder(
        vocab_size=11,
        layers=1,
        d_model=8,
        attention=Attention(heads=2),
        feedforward=Gated(d_ff=16),
        norm=RMSNorm(),
        position=Rotary(),
        dropout=0.5,
    )
    return build(config)


MODEL = decoder()
IDS = torch.randint(0, 11, (50,), generator=torch.Generator().manual_seed(1)).tolist()


def score(model: torch.nn.Module, text: Text, reading: Reading, limit: int | None = None) -> Score:
    return Score.of(token_scores(model, text, reading, limit=limit), text, limit)


def score_counts(model: torch.nn.Module, text: Text) -> Score:
    return Score.of([counted_scores(model, text)], text)


def direct(ids: list[int]) -> float:
    """Σ −log p of ids[1:], reading everything at once."""
    MODEL.eval()
    with torch.no_grad():
        logits = MODEL(torch.tensor([ids[:-1]]))[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum"))


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 20))
@examples(max_examples=100, deadline=None)
def test_spans_predict_every_token_once(tokens: int, length: int, stride: int) -> None:
    predicted: list[int] = []
    for span in spans(tokens, length, None if stride == 0 else min(stride, length)):
        assert 0 < span.scored <= span.length <= length
        last = span.start + span.length
        predicted += range(last - span.scored + 1, last + 1)
    assert predicted == list(range(1, tokens))


def test_one_window_is_the_sum_over_the_text() -> None:
    result = score(MODEL, Text(IDS, size=200), Reading(64))
    assert result.tokens == 49
    assert result.nats == pytest.approx(direct(IDS), rel=1e-5)
    assert result.loss == pytest.approx(result.nats / 49)
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2) / 200)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_windows_are_scored_apart_however_they_are_batched(batch: int) -> None:
    expected = sum(direct(IDS[i : i + 13]) for i in range(0, 49, 12))
    result = score(MODEL, Text(IDS), Reading(12, batch=batch))
    assert result.tokens == 49
    assert result.nats == pytest.approx(expected, rel=1e-5)


def test_a_token_before_the_text_lets_its_first_one_count() -> None:
    result = score(MODEL, Text(IDS), Reading(64, first=3))
    assert result.tokens == 50
    assert result.nats == pytest.approx(direct([3, *IDS]), rel=1e-5)
    cut = score(MODEL, Text(IDS), Reading(12, first=3))
    assert cut.nats == pytest.approx(sum(direct([3, *IDS][i : i + 13]) for i in range(0, 50, 12)), rel=1e-5)


def test_a_stride_gives_every_token_more_context() -> None:
    result = score(MODEL, Text(IDS), Reading(12, stride=1))
    expected = direct(IDS[:13])
    MODEL.eval()
    for i in range(13, 50):
        with torch.no_grad():
            logits = MODEL(torch.tensor([IDS[i - 12 : i]]))[0, -1]
        expected += float(-logits.double().log_softmax(-1)[IDS[i]])
    assert result.tokens == 49
    assert result.nats == pytest.approx(expected, rel=1e-5)


def test_documents_do_not_see_each_other() -> None:
    """With the mask each document is scored as if it stood alone, without its first token."""
    result = score(MODEL, Text(IDS, documents=[0] * 20 + [1] * 30), Reading(64, document_mask=True))
    assert result.tokens == 48
    assert result.nats == pytest.approx(direct(IDS[:20]) + direct(IDS[20:]), rel=1e-5)
    with pytest.raises(DataError, match="no document"):
        score(MODEL, Text([1, 2, 3], documents=[0, 1, 2]), Reading(64, document_mask=True))


def test_scoring_changes_nothing_in_the_model() -> None:
    MODEL.train()
    first = score(MODEL, Text(IDS), Reading(12))
    assert MODEL.training
    assert first == score(MODEL, Text(IDS), Reading(12))  # dropout is off while scoring
    MODEL.eval()


def test_every_family_is_scored_alike() -> None:
    torch.manual_seed(0)
    model = build(Recurrent(vocab_size=11, d_model=8, cell="lstm"))
    with torch.no_grad():
        logits = model(torch.tensor([IDS[:-1]]))[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="sum")
    assert score(model, Text(IDS), Reading(100)).nats == pytest.approx(float(expected), rel=1e-5)


def test_counts_are_looked_up_and_agree_with_the_windows() -> None:
    model = build(NGram(vocab_size=11, order=3))
    model.fit(np.array(IDS[:40]))
    quick = score_counts(model, Text(IDS))
    assert quick.tokens == 50
    windows = score(model, Text(IDS), Reading(64))  # all but the first token, which has nothing before it
    first = -float(model.log_prob(np.array(IDS[:1]))[0])
    assert quick.nats == pytest.approx(windows.nats + first, rel=1e-4)
    apart = score_counts(model, Text(IDS, documents=[0] * 20 + [1] * 30))
    assert apart.nats == pytest.approx(
        score_counts(model, Text(IDS[:20])).nats + score_counts(model, Text(IDS[20:])).nats, rel=1e-5
    )


def test_a_limit_scores_the_beginning() -> None:
    part = score(MODEL, Text(IDS, size=100), Reading(12), limit=20)
    assert part == score(MODEL, Text(IDS[:20], size=40), Reading(12))


def test_a_large_vocabulary_is_scored_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(MODEL, Text(IDS), Reading(12))
    monkeypatch.setattr("weft.evaluate.perplexity.HEAD_ELEMENTS", 33)
    assert score(MODEL, Text(IDS), Reading(12)).nats == pytest.approx(whole.nats, rel=1e-6)


def test_texts_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(DataError, match="holds 1 tokens"):
        score(MODEL, Text([1]), Reading(12))
    with pytest.raises(DataError, match="stride = 13: expected 1 … 12"):
        score(MODEL, Text(IDS), Reading(12, stride=13))


def test_impossible_words_have_infinite_perplexity() -> None:
    assert Score(math.inf, 3, 3).perplexity == math.inf
