"""The learning rate at the steps where it changes."""

import pytest

from weft.recipe.optimizer import WSD, Constant, Cosine, LinearDecay, StepDecay
from weft.training.schedule import build


def test_cosine_rises_to_the_peak_and_falls_to_the_floor() -> None:
    rate = build(Cosine(warmup=10, floor=0.1), 1.0, 110, d_model=64)
    assert [rate(1), rate(5), rate(10)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(60) == pytest.approx(0.55)  # half-way down: the mean of 1 and 0.1
    assert rate(110) == pytest.approx(0.1)
    assert rate(500) == pytest.approx(0.1)


def test_linear() -> None:
    rate = build(LinearDecay(warmup=4, floor=0.0), 2.0, 24, d_model=64)
    assert [rate(2), rate(4), rate(14), rate(24)] == pytest.approx([1.0, 2.0, 1.0, 0.0])


def test_warm_up_stay_decay() -> None:
    rate = build(WSD(warmup=5, decay=0.2, floor=0.0), 1.0, 100, d_model=64)
    assert [rate(1), rate(5), rate(80), rate(90), rate(100)] == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.0])


def test_steps_down() -> None:
    rate = build(StepDecay(warmup=0, hold=6, every=3, factor=0.5), 8.0, 100, d_model=64)
    assert [rate(step) for step in (1, 6, 7, 9, 10, 13)] == [8.0, 8.0, 4.0, 4.0, 2.0, 1.0]


def test_constant_without_warmup() -> None:
    rate = build(Constant(warmup=0), 0.3, 10, d_model=64)
    assert [rate(1), rate(10)] == [0.3, 0.3]


@pytest.mark.parametrize("kind", [Constant, LinearDecay, Cosine, WSD])
def test_every_step_before_the_last_has_a_rate(kind: type) -> None:
    """Even if warm-up takes all steps no rate is negative, and that of the first step is positive."""
    rate = build(kind(warmup=7), 1.0, 7, d_model=64)
    assert all(rate(step) > 0 for step in range(1, 7))
    assert all(0 <= rate(step) <= 1 for step in range(1, 20))
