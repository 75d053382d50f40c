"""Functions from logits to tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.later import Later
from torch import Tensor

from weft.config import validate
from weft.decode import sampling
from weft.decode.config import Sampling
from weft.decode.sampling import check_logits, choose_tokens, draw, filter_logits, greedy, min_p, top_k, top_p
from weft.errors import ConfigError, ModelError

stats = Later("scipy.stats")
logit_row = st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7)
logit_rows = st.lists(logit_row, min_size=1, max_size=4).map(torch.tensor)
LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()


@pytest.mark.parametrize(
    ("filtered", "kept"),
    [
        (top_k(LOGITS, 2), [0, 1]),
        (top_k(LOGITS, 99), [0, 1, 2, 3, 4]),
        (top_p(LOGITS, 0.39), [0]),  # the first token alone reaches it
        (top_p(LOGITS, 0.41), [0, 1]),
        (top_p(LOGITS, 0.69), [0, 1]),
        (top_p(LOGITS, 0.71), [0, 1, 2]),
        (top_p(LOGITS, 1.0), [0, 1, 2, 3, 4]),
        (min_p(LOGITS, 0.49), [0, 1, 2]),
        (min_p(LOGITS, 0.76), [0]),
        (filter_logits(LOGITS[None], [Sampling(temperature=2.0, top_k=3, top_p=0.7)])[0], [0, 1]),
    ],
)
def test_filters_keep_what_their_definitions_say(filtered: Tensor, kept: list[int]) -> None:
    assert torch.isfinite(filtered).nonzero().flatten().tolist() == kept


def test_temperature_sharpens_and_flattens() -> None:
    several = [Sampling(temperature=0.5), Sampling(temperature=50.0)]
    sharp, flat = filter_logits(LOGITS.expand(2, -1), several).softmax(-1)
    assert torch.allclose(sharp, (LOGITS.exp() ** 2) / (LOGITS.exp() ** 2).sum())
    assert flat.max() < 0.21


def test_filters_compose_in_the_stated_order() -> None:
    both = filter_logits(LOGITS[None], [Sampling(temperature=2.0, top_k=3, top_p=0.7)])[0]
    assert torch.equal(both, top_p(top_k(LOGITS / 2.0, 3), 0.7))


@given(logit_rows, st.integers(1, 9), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
@settings(max_examples=25, deadline=None)
def test_filters_keep_the_likeliest_and_change_no_kept_logit(logits: Tensor, k: int, p: float, fraction: float) -> None:
    before = logits.clone()
    for result in (top_k(logits, k), top_p(logits, p), min_p(logits, fraction)):
        kept = torch.isfinite(result)
        assert torch.equal(result[kept], logits[kept])
        assert bool(kept.gather(-1, greedy(logits).unsqueeze(-1)).all())
    assert torch.equal(logits, before)
    assert bool((torch.isfinite(top_k(logits, k)).sum(-1) >= min(k, 7)).all())
    total = logits.softmax(-1).where(torch.isfinite(top_p(logits, p)), torch.zeros(())).sum(-1)
    assert bool((total >= p - 1e-5).all())


def test_greedy_takes_the_first_of_ties() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]
    large = torch.zeros(1, 70_001)
    large[0, 40_003::5] = 1.0
    assert greedy(large).tolist() == [40_003]


def test_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(5, 4)
    points = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.9999], dtype=torch.float64)
    assert draw(logits, points).tolist() == [0, 0, 2, 2, 3]


def test_ancestral_sampling_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.04, 0.01])
    n = 100_000
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    observed = torch.bincount(draw(probabilities.log().expand(n, 6), uniforms), minlength=6).numpy()
    expected = probabilities.double().numpy() / probabilities.double().sum().item() * n
    assert stats.chisquare(observed, expected).pvalue > 0.001


def test_a_row_draws_the_same_token_alone_and_in_a_batch() -> None:
    several = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0)]
    several += [Sampling(temperature=1.5, top_k=4), Sampling(top_k=9, top_p=0.5), Sampling(min_p=0.3, typical_p=0.6)]
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    uniforms = [0.3, 0.6, 0.9, 0.99, 0.8, 0.7]
    together = choose_tokens(logits, several, uniforms).tolist()
    for row, token in enumerate(together):
        assert choose_tokens(logits[row : row + 1], several[row : row + 1], uniforms[row : row + 1]).tolist() == [token]
    assert together[2] == int(greedy(logits[2]))


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN"), (math.inf, "NaN or infinite"), (-math.inf, "no token")]
)
def test_logits_without_a_choice_are_refused(value: float, message: str) -> None:
    logits = torch.full((1, 4), value)
    with pytest.raises(ModelError, match=message):
        check_logits(logits)
    marks = sampling.mark_invalid(torch.tensor([2, 3]), torch.cat([logits, torch.zeros(1, 4)])).tolist()
    assert message in str(sampling.invalid_logits_error(marks[0])) and marks[1] == 3


def test_top_log_probs_of_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    for size in (7, 300, 20_013):
        logits = torch.randn(5, size) * 4
        logits[1, : size // 2] = -torch.inf
        logits[2] = -torch.inf
        log_p, ids = sampling.top_log_probs(logits, 6)
        expected, expected_ids = logits.double().log_softmax(-1).topk(6)
        finite = [0, 1, 3, 4]
        assert ids[finite].equal(expected_ids[finite])
        torch.testing.assert_close(log_p[finite], expected[finite], atol=1e-5, rtol=0)
        assert (log_p[2] == -torch.inf).all()
        logits[3, 1] = torch.nan
        with pytest.raises(ModelError, match="NaN or infinite"):
            sampling.top_log_probs(logits, 6)


IMPOSSIBLE = [
    ("temperature", -0.1), ("temperature", math.nan), ("top_p", 1.5), ("top_p", 0.0), ("min_p", -1.0), ("top_k", 0),
    ("typical_p", 1.1), ("max_tokens", 0), ("seed", -1), ("stop", [""]), ("logit_bias", {-1: 2.0}), ("logprobs", -1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        validate(Sampling, {key: value})
