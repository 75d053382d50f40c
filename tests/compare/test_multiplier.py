"""The compute multiplier and its interval, for known curves and for degenerate ones."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator
from tests.later import Later

from weft.compare.multiplier import Curve, Multiplier, multiplier
from weft.evaluate.bootstrap import bands, resample

stats = Later("scipy.stats")
SIZES = np.array([100.0, 300.0, 200.0])
RUNGS = np.array([1 / 27, 1 / 9, 1 / 3, 1.0])


@dataclass(frozen=True)
class World:
    """Curves that approach `floor`; `falls` is the reducible loss at the whole budget.

    `seed_noise`, `section_noise` and `difficulty` are relative: per run, per section of a run, and per section of all.
    """

    floor: float = 0.8
    falls: float = 0.5
    exponent: float = 0.15
    seed_noise: float = 0.005
    section_noise: float = 0.05
    difficulty: float = 0.2
    seeds: int = 3
    sections: int = 100

    def curves(self, times: float, rng: np.random.Generator) -> tuple[Curve, Curve]:
        """Return a contender that is `times` as efficient, and the baseline."""
        sizes = rng.integers(500, 2000, size=self.sections).astype(float)
        hard = np.exp(self.difficulty * rng.normal(size=self.sections))
        hard /= (hard * sizes).sum() / sizes.sum()
        return self.curve(times, sizes, hard, rng=rng), self.curve(1.0, sizes, hard, rng=rng)

    def curve(self, times: float, sizes: np.ndarray, hard: np.ndarray, *, rng: np.random.Generator) -> Curve:
        shape = (len(RUNGS), self.seeds, self.sections)
        loss = (self.floor + self.falls * (RUNGS * times) ** -self.exponent)[:, None, None] * hard
        loss = loss * (1 + self.seed_noise * rng.normal(size=(*shape[:2], 1)))
        # a contender is better at some sections than at others, regardless of the seed
        loss = loss * (1 + self.section_noise * rng.normal(size=(shape[0], 1, shape[2])))
        return Curve(RUNGS * 1e15, loss * sizes * np.log(2), sizes)


def interval(nats: np.ndarray, sizes: np.ndarray, **options: int) -> tuple[float, float]:
    """Return the interval of a single rung."""
    low, high = bands([nats], sizes, **options)[0].tolist()
    return low, high


def measured(contender: Curve, baseline: Curve, **options: int) -> Multiplier:
    found = multiplier(contender, baseline, **options)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def curve(losses: list[float], amounts: list[float] | None = None, seeds: int = 3) -> Curve:
    """Return a curve without noise: every section and every seed has the rung's loss."""
    nats = np.array(losses)[:, None, None] * np.ones((1, seeds, 1)) * SIZES * math.log(2)
    return Curve(np.array(amounts or 10.0 ** np.arange(len(losses))), nats, SIZES)


def test_the_interpolation_equals_scipys() -> None:
    baseline = curve([2.0, 1.5, 1.45, 1.2, 1.17], [1e3, 2e3, 9e3, 2e4, 1e5])
    contender = curve([1.9, 1.31, 1.0], [3e3, 7e3, 5e4])
    found = measured(contender, baseline, draws=50)
    amount = math.exp(PchipInterpolator(-np.log([1.9, 1.31, 1.0]), np.log([3e3, 7e3, 5e4]))(-math.log(1.17)))
    assert (found.value, found.loss, found.share) == pytest.approx((1e5 / amount, 1.17, amount / 5e4))
    assert found.at_full is None  # the baseline never reaches 1.0
    back = measured(baseline, contender, draws=50)
    assert back.value == pytest.approx(amount / 1e5)
    assert (back.at_full, back.share) == (back.value, 1)
    between = measured(curve([1.3], [6e3]), baseline, draws=50)
    other = PchipInterpolator(-np.log([2.0, 1.5, 1.45, 1.2, 1.17]), np.log([1e3, 2e3, 9e3, 2e4, 1e5]))
    expected = math.exp(other(-math.log(1.3))) / 6e3
    assert (between.value, between.low, between.high) == pytest.approx((expected,) * 3)  # no noise, no width


@pytest.mark.parametrize("times", [0.5, 2, 3, 10])
@pytest.mark.parametrize(
    "world", [(0.8, 0.5, 0.15), (0.5, 1.0, 0.08), (0.9, 0.4, 0.3), (0.0, 1.2, 0.1), (1.2, 0.3, 0.5)]
)
def test_a_known_multiplier_is_recovered_within_two_percent(world: tuple[float, ...], times: float) -> None:
    floor, falls, exponent = world
    quiet = World(floor, falls, exponent, seed_noise=0.0, section_noise=0.0)
    assert measured(*quiet.curves(times, np.random.default_rng(0)), draws=20).value == pytest.approx(times, rel=0.02)


@pytest.mark.parametrize(
    ("times", "noise"),
    [(10, 0.003), (3, 0.01), *(pytest.param(times, 0.003, marks=pytest.mark.slow) for times in (2, 3))],
)
def test_the_interval_covers_the_truth(times: float, noise: float) -> None:
    world = World(seed_noise=noise)
    rng = np.random.default_rng(round(times))
    found = [measured(*world.curves(times, rng), draws=300, seed=number) for number in range(100)]
    assert sum(m.low <= times <= m.high for m in found) >= 90
    assert np.median([m.value for m in found]) == pytest.approx(times, rel=0.05)
    # the interval is not merely wide: the values scatter by about half of its half-width
    assert np.median([math.log(m.high / m.low) / 2 for m in found]) < 3 * np.std([math.log(m.value) for m in found])


def test_values_and_intervals_beyond_the_measured_range() -> None:
    poor, rich = curve([2.0, 1.8, 1.6], [1.0, 3.0, 9.0]), curve([1.5, 1.4, 1.3], [1.0, 3.0, 9.0])
    above, below = measured(rich, poor), measured(poor, rich)
    assert (above.value, above.beyond, above.high, above.at_full) == (9.0, "above", math.inf, None)
    assert above.text() == "more than 9.0×"
    assert (below.value, below.beyond, below.low, below.at_full) == (pytest.approx(1 / 9), "below", 0.0, None)
    assert below.text() == "less than 0.11×"
    found = measured(*World(seed_noise=0.01).curves(26, np.random.default_rng(3)))
    assert found.low < 26 and found.high == math.inf
    assert "at least" in found.text() or found.beyond


def test_rungs_that_are_no_better_are_ignored() -> None:
    noisy = measured(curve([2.0, 2.1, 1.5, 1.5, 1.6]), curve([2.0, 1.5], [1.0, 100.0]))
    assert noisy.value == pytest.approx(1)
    assert noisy.share == pytest.approx(1 / 100)  # the third of five rungs already reaches it
    assert measured(curve([1.5, 1.5]), curve([1.5, 1.5], [5.0, 50.0])).value == pytest.approx(5)
    twice = measured(curve([2.0, 1.9, 1.5], [1.0, 1.0, 4.0]), curve([2.0, 1.5], [1.0, 4.0]))
    assert twice.value == pytest.approx(1)  # two rungs of one amount count once


def test_curves_without_a_multiplier() -> None:
    trained = curve([2.0, 1.5])
    assert multiplier(curve([1.9], [0.0], seeds=1), trained) is None  # an n-gram model has no FLOPs
    assert multiplier(trained, curve([1.9], [0.0], seeds=1)) is None
    assert multiplier(Curve(np.array([]), np.array([]), np.array([])), trained) is None  # every job failed
    assert multiplier(curve([math.nan, math.inf]), trained) is None
    part = measured(curve([2.0, math.nan, 1.5]), trained)  # a rung that diverged is left out
    assert part.value == pytest.approx(10 / 100)
    assert measured(trained, trained).text() == "1.0× (1.0 in all draws)"


def test_one_rung_and_one_seed() -> None:
    nats = np.random.default_rng(0).uniform(0.9, 1.1, size=(1, 1, 3)) * SIZES
    single = Curve(np.array([1e3]), nats, SIZES)
    assert multiplier(single, single) is None
    double = Curve(np.array([1e3, 1e4]), np.concatenate([nats, 0.9 * nats]), SIZES)
    found = measured(double, double)
    assert found.value == pytest.approx(1)
    assert math.isnan(found.low) and math.isnan(found.high)  # the variation between seeds is unknown
    assert found.text() == "1.0× (one seed, so no interval)"
    assert multiplier(single, double) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((2.14, 1.81, 2.49), "2.1× (1.8–2.5)"),
        ((12.4, 9.96, 1310.0), "12× (10–1,310)"),
        ((0.5, 0.42, 0.61), "0.50× (0.42–0.61)"),
        ((2.0, 1.0, math.inf), "2.0× (at least 1.0)"),
        ((0.04, 0.0, 0.08), "0.040× (at most 0.080)"),
        ((1.2, 1.205, 1.241), "1.2× (1.21–1.24)"),
        ((1.2, 1.2, 1.2), "1.2× (1.2 in all draws)"),
        ((1.2, math.nan, math.nan), "1.2× (one seed, so no interval)"),
        ((1.0, 0.0, math.inf), "1.0× (beyond the measured range on both sides)"),
    ],
)
def test_multipliers_are_formatted(value: tuple[float, float, float], text: str) -> None:
    assert Multiplier(*value, loss=1.0, share=1.0).text() == text


def test_the_interval_over_seeds_is_students_t() -> None:
    losses = np.array([1.30, 1.31, 1.335])
    nats = losses[:, None] * SIZES * math.log(2)
    low, high = interval(nats, SIZES, draws=40_000)
    mean, scatter = np.log(losses).mean(), np.log(losses).std(ddof=1)
    expected = np.exp(stats.t.interval(0.95, 2, mean, scatter / math.sqrt(3)))
    assert (low, high) == pytest.approx(tuple(expected), rel=2e-3)
    assert interval(nats[:1, :1], SIZES[:1]) == pytest.approx((1.30, 1.30))


def test_the_interval_over_sections_covers_the_mean() -> None:
    rng = np.random.default_rng(0)
    for sections in (8, 200):
        covered = 0
        for number in range(300):
            sizes = rng.uniform(500, 1500, size=sections)
            nats = sizes * math.log(2) * rng.normal(1.5, 0.3, size=sections)
            low, high = interval(nats[None], sizes, draws=500, seed=number)
            covered += low <= 1.5 <= high
        assert 0.92 <= covered / 300 <= 0.98


def test_rungs_share_the_variation_between_seeds() -> None:
    sizes = np.ones(2)
    noise = np.random.default_rng(5).normal(size=(6, 3, 1))
    nats = (1.5 + 0.01 * (noise - noise.mean(axis=1, keepdims=True))) * sizes
    together = bands(list(nats), sizes)
    alone = np.array([interval(rung, sizes) for rung in nats])
    assert together.shape == (6, 2)
    assert np.median(np.diff(together)) < 0.8 * np.median(np.diff(alone))
    # a rung with more variation than the others keeps it
    nats[3] = (nats[3] - 1.5) * 20 + 1.5
    assert np.argmax(np.diff(bands(list(nats), sizes))) == 3


def test_sections_are_drawn_jointly() -> None:
    nats = np.random.default_rng(1).uniform(500, 1000, size=(1, 40))
    first, second = resample([[nats], [nats * 1.1]], np.full(40, 500.0), draws=100)
    assert np.allclose(second / first, 1.1)
    assert first.std() > 0.01
    nats, sizes = np.random.default_rng(0).uniform(500, 900, size=(3, 1000)), np.full(1000, 500.0)
    assert interval(nats, sizes) == interval(nats, sizes)  # deterministic
