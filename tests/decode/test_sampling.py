"""The pure functions on logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.config import validate
from weft.decode.config import Sampling
from weft.decode.sampling import (
    check_logits,
    choose_tokens,
    draw,
    filter_logits,
    greedy,
    invalid_logits_error,
    mark_invalid,
    min_p,
    top_k,
    top_p,
)
from weft.errors import ConfigError, ModelError

logit_rows = st.lists(st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7), min_size=1, max_size=4).map(
    torch.tensor
)


def kept(logits: Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()


def test_filters_keep_what_their_definitions_say() -> None:
    assert kept(top_k(LOGITS, 2)) == [0, 1]
    assert kept(top_k(LOGITS, 99)) == [0, 1, 2, 3, 4]
    assert kept(top_p(LOGITS, 0.39)) == [0]  # the first alone reaches it
    assert kept(top_p(LOGITS, 0.41)) == [0, 1]
    assert kept(top_p(LOGITS, 0.69)) == [0, 1]
    assert kept(top_p(LOGITS, 0.71)) == [0, 1, 2]
    assert kept(top_p(LOGITS, 1.0)) == [0, 1, 2, 3, 4]
    assert kept(min_p(LOGITS, 0.49)) == [0, 1, 2]
    assert kept(min_p(LOGITS, 0.76)) == [0]


def test_temperature_sharpens_and_flattens() -> None:
    sharp, flat = filter_logits(LOGITS.expand(2, -1), [Sampling(temperature=0.5), Sampling(temperature=50.0)]).softmax(
        -1
    )
    assert torch.allclose(sharp, (LOGITS.exp() ** 2) / (LOGITS.exp() ** 2).sum())
    assert flat.max() < 0.21


def test_filters_compose_in_the_stated_order() -> None:
    both = filter_logits(LOGITS[None], [Sampling(temperature=2.0, top_k=3, top_p=0.7)])[0]
    flat = top_k(LOGITS / 2.0, 3)
    assert torch.equal(both, top_p(flat, 0.7))
    assert kept(both) == [0, 1]


@given(logit_rows, st.integers(1, 9), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_every_filter_keeps_the_likeliest_and_changes_no_kept_logit(
    logits: Tensor, k: int, p: float, least: float
) -> None:
    before = logits.clone()
    for result in (top_k(logits, k), top_p(logits, p), min_p(logits, least)):
        stays = torch.isfinite(result)
        assert torch.equal(result[stays], logits[stays])
        assert bool(stays.gather(-1, greedy(logits).unsqueeze(-1)).all())
    assert torch.equal(logits, before)
    assert bool((torch.isfinite(top_k(logits, k)).sum(-1) >= min(k, 7)).all())
    nucleus = logits.softmax(-1).where(torch.isfinite(top_p(logits, p)), torch.zeros(())).sum(-1)
    assert bool((nucleus >= p - 1e-5).all())


def test_greedy_takes_the_first_of_equals() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]
    many = torch.zeros(1, 70_001)
    many[0, 40_003::5] = 1.0
    assert greedy(many).tolist() == [40_003]


def test_draw_follows_the_slices() -> None:
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(5, 4)
    points = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.9999], dtype=torch.float64)
    assert draw(logits, points).tolist() == [0, 0, 2, 2, 3]


def test_ancestral_sampling_is_exact() -> None:
    from scipy.stats import chisquare

    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.04, 0.01])
    n = 100_000
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw(probabilities.log().expand(n, 6), uniforms)
    observed = torch.bincount(drawn, minlength=6).numpy()
    assert chisquare(observed, probabilities.double().numpy() / probabilities.double().sum().item() * n).pvalue > 0.001


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    several = [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0)]
    several += [Sampling(temperature=1.5, top_k=4), Sampling(top_k=9, top_p=0.5), Sampling(min_p=0.3, typical_p=0.6)]
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    uniforms = [0.3, 0.6, 0.9, 0.99, 0.8, 0.7]
    together = choose_tokens(logits, several, uniforms).tolist()
    rows = [slice(row, row + 1) for row in range(6)]
    alone = [choose_tokens(logits[row], several[row], uniforms[row]).tolist() for row in rows]
    assert [[token] for token in together] == alone
    assert together[2] == int(greedy(logits[2]))


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (math.inf, "NaN or infinite"), (-math.inf, "no token")]
)
def test_logits_that_mean_nothing_are_refused(value: float, words: str) -> None:
    logits = torch.full((1, 4), value)
    with pytest.raises(ModelError, match=words):
        check_logits(logits)
    mark = mark_invalid(torch.tensor([2, 3]), torch.cat([logits, torch.zeros(1, 4)])).tolist()
    assert words in str(invalid_logits_error(mark[0])) and mark[1] == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("min_p", -1.0),
        ("top_k", 0),
        ("max_tokens", 0),
        ("seed", -1),
        ("stop", [""]),
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        validate(Sampling, {key: value})


def test_greedy_refuses_filters_that_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="greedy"):
        validate(Sampling, {"temperature": 0.0, "top_k": 5})
