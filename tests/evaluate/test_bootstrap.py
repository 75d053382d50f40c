"""Intervals cover the true value as often as they claim, for sections of any sizes."""

import numpy as np
import pytest

from weft.evaluate.bootstrap import ratio_interval, weights


def test_draws_are_a_multinomial_with_replacement() -> None:
    drawn = weights(40, 5000, np.random.default_rng(3))
    assert drawn.shape == (5000, 40) and (drawn.sum(axis=1) == 40).all()
    assert drawn.mean() == 1.0 and drawn.var() == pytest.approx(1 - 1 / 40, rel=0.02)
    np.testing.assert_array_equal(drawn, weights(40, 5000, np.random.default_rng(3)))
    assert (drawn != weights(40, 5000, np.random.default_rng(4))).any()
    # The interval equals that of sections drawn one by one.
    rng = np.random.default_rng(0)
    costs, sizes = rng.gamma(2.0, size=30), rng.integers(1, 9, 30)
    picks = rng.integers(0, 30, (4000, 30))
    expected = np.quantile(costs[picks].sum(axis=1) / sizes[picks].sum(axis=1), [0.025, 0.975])
    np.testing.assert_allclose(ratio_interval(costs, sizes, weights(30, 4000)), expected, rtol=0.03)


def test_intervals_cover_the_true_value_and_equal_sections_have_none() -> None:
    rng, covered, drawn = np.random.default_rng(1), 0, weights(100)
    for _ in range(300):
        sizes = rng.integers(100, 2000, 100).astype(float)
        low, high = ratio_interval(sizes * rng.normal(1.5, 0.4, 100), sizes, drawn)
        covered += low <= 1.5 <= high
    assert 0.90 <= covered / 300 <= 0.98
    assert ratio_interval([3.0] * 5, [2.0] * 5, weights(5)) == (1.5, 1.5)
