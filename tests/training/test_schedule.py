"""The learning rate at the steps where it changes."""

import pytest

from weft.recipe.optimizer import WSD, Constant, Cosine, LinearDecay, Schedule, StepDecay
from weft.training.schedule import build


@pytest.mark.parametrize(
    ("settings", "lr", "steps", "rates"),
    [
        # half-way down: the mean of 1 and 0.1
        (Cosine(warmup=10, floor=0.1), 1.0, 110, {1: 0.1, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        (LinearDecay(warmup=4, floor=0.0), 2.0, 24, {2: 1.0, 4: 2.0, 14: 1.0, 24: 0.0}),
        (WSD(warmup=5, decay=0.2, floor=0.0), 1.0, 100, {1: 0.2, 5: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        (StepDecay(warmup=0, hold=6, every=3, factor=0.5), 8.0, 100, {1: 8, 6: 8, 7: 4, 9: 4, 10: 2, 13: 1}),
        (Constant(warmup=0), 0.3, 10, {1: 0.3, 10: 0.3}),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_rates(settings: Schedule, lr: float, steps: int, rates: dict[int, float]) -> None:
    rate = build(settings, lr, steps, d_model=64)
    assert {step: rate(step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("kind", [Constant, LinearDecay, Cosine, WSD])
def test_every_step_before_the_last_has_a_rate(kind: type) -> None:
    """Even if warm-up takes all steps no rate is negative, and that of the first step is positive."""
    rate = build(kind(warmup=7), 1.0, 7, d_model=64)
    assert all(rate(step) > 0 for step in range(1, 7))
    assert all(0 <= rate(step) <= 1 for step in range(1, 20))
