"""Scores are sums over all tokens, each counted once, with any windows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.data import held

from weft.data.shards import Tokens
from weft.errors import DataError
from weft.evaluate.perplexity import Score, ScoringOptions, ngram_token_scores, token_losses, token_scores, windows
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import NGram, Recurrent
from weft.models.ngram import NGram as NGramModel
from weft.models.presets import llama


def tokens(ids: list[int], size: int | None = None, starts: tuple[int, ...] = (0,)) -> Tokens:
    """A text whose documents start at `starts`; `size` is its number of bytes."""
    return held.tokens(np.array(ids), list(starts), [len(ids) if size is None else size, *[0] * (len(starts) - 1)])


torch.manual_seed(0)
MODEL = build(llama(1, 8, 2, d_ff=16, vocab_size=11, tied=True, dropout=0.5))
IDS = torch.randint(0, 11, (50,), generator=torch.Generator().manual_seed(1)).tolist()


def score(model: LanguageModel, text: Tokens, options: ScoringOptions, limit: int | None = None) -> Score:
    return Score.of(token_scores(model, text, options, limit=limit), text, limit)


@torch.no_grad()
def forward_loss(model: LanguageModel, ids: list[int]) -> float:
    logits = model(torch.tensor([ids[:-1]]))[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum"))


def direct(ids: list[int]) -> float:
    """Σ −log p of ids[1:] in one forward pass."""
    return forward_loss(MODEL.eval(), ids)


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 20))
@examples(max_examples=40, deadline=None)
def test_windows_predict_every_token_once(count: int, length: int, stride: int) -> None:
    predicted: list[int] = []
    for window in windows(count, length, None if stride == 0 else min(stride, length)):
        assert 0 < window.scored <= window.length <= length
        last = window.start + window.length
        predicted += range(last - window.scored + 1, last + 1)
    assert predicted == list(range(1, count))


def test_one_window_is_the_sum_over_the_text() -> None:
    result = score(MODEL, tokens(IDS, size=200), ScoringOptions(64))
    assert result.tokens == 49
    assert result.nats == pytest.approx(direct(IDS), rel=1e-5)
    assert result.loss == pytest.approx(result.nats / 49)
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2) / 200)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_windows_are_independent_of_the_batch(batch: int) -> None:
    expected = sum(direct(IDS[i : i + 13]) for i in range(0, 49, 12))
    result = score(MODEL, tokens(IDS), ScoringOptions(12, batch=batch))
    assert result.tokens == 49
    assert result.nats == pytest.approx(expected, rel=1e-5)


def test_with_a_token_before_the_text_its_first_token_counts() -> None:
    result = score(MODEL, tokens(IDS), ScoringOptions(64, first=3))
    assert result.tokens == 50
    assert result.nats == pytest.approx(direct([3, *IDS]), rel=1e-5)
    several = score(MODEL, tokens(IDS), ScoringOptions(12, first=3))
    assert several.nats == pytest.approx(sum(direct([3, *IDS][i : i + 13]) for i in range(0, 50, 12)), rel=1e-5)


def test_a_stride_gives_every_token_more_context() -> None:
    result = score(MODEL, tokens(IDS), ScoringOptions(12, stride=1))
    # the last token of each window: a loss of 13 tokens without that of the first 12
    expected = direct(IDS[:13]) + sum(direct(IDS[i - 12 : i + 1]) - direct(IDS[i - 12 : i]) for i in range(13, 50))
    assert result.tokens == 49
    assert result.nats == pytest.approx(expected, rel=1e-5)


def test_masked_documents_are_scored_separately() -> None:
    """Each document is scored alone, without its first token."""
    result = score(MODEL, tokens(IDS, starts=(0, 20)), ScoringOptions(64, document_mask=True))
    assert result.tokens == 48
    assert result.nats == pytest.approx(direct(IDS[:20]) + direct(IDS[20:]), rel=1e-5)
    with pytest.raises(DataError, match="no document"):
        score(MODEL, tokens([1, 2, 3], starts=(0, 1, 2)), ScoringOptions(64, document_mask=True))


def test_scoring_does_not_change_the_model() -> None:
    MODEL.train()
    first = score(MODEL, tokens(IDS), ScoringOptions(12))
    assert MODEL.training
    assert first == score(MODEL, tokens(IDS), ScoringOptions(12))  # dropout is off while scoring
    MODEL.eval()


def test_recurrent_models_are_scored() -> None:
    torch.manual_seed(0)
    model = build(Recurrent(vocab_size=11, d_model=8, cell="lstm"))
    assert score(model, tokens(IDS), ScoringOptions(100)).nats == pytest.approx(forward_loss(model, IDS), rel=1e-5)


def test_ngram_scores_agree_with_windows() -> None:
    model = NGramModel(NGram(vocab_size=11, order=3))
    model.fit(np.array(IDS[:40]))

    def nats(ids: list[int], starts: tuple[int, ...] = (0,)) -> list[float]:
        return ngram_token_scores(model, tokens(ids, starts=starts), limit=None, unscored=()).nats.tolist()

    windowed = score(model, tokens(IDS), ScoringOptions(64))  # without the first token, which has no context
    first = -float(model.log_prob(np.array(IDS[:1]))[0])
    assert sum(nats(IDS)) == pytest.approx(windowed.nats + first, rel=1e-4) and len(nats(IDS)) == 50
    assert nats(IDS, (0, 20)) == pytest.approx([*nats(IDS[:20]), *nats(IDS[20:])], rel=1e-5)


def test_a_limit_scores_the_first_tokens() -> None:
    part = score(MODEL, tokens(IDS, size=100), ScoringOptions(12), limit=20)
    assert part == score(MODEL, tokens(IDS[:20], size=40), ScoringOptions(12))


def test_a_large_vocabulary_is_scored_in_slices() -> None:
    features, targets = torch.randn(50, 8), torch.tensor(IDS)
    with torch.no_grad():
        sliced = token_losses(MODEL, features, targets, max_logits=33)
        torch.testing.assert_close(sliced, token_losses(MODEL, features, targets))


def test_impossible_texts_and_strides_are_refused_but_not_infinity() -> None:
    with pytest.raises(DataError, match="holds 1 tokens"):
        score(MODEL, tokens([1]), ScoringOptions(12))
    with pytest.raises(DataError, match="stride = 13: expected 1 … 12"):
        score(MODEL, tokens(IDS), ScoringOptions(12, stride=13))
    assert Score(math.inf, 3, 3).perplexity == math.inf
