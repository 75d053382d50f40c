"""The scaling law: known constants are recovered, and the next rung is predicted."""

import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from weft.compare.fit import Fit, Point, fit
from weft.errors import ConfigError

HOFFMANN = (1.69, 406.4, 410.7, 0.34, 0.28)
BITS = (0.75, 25.0, 30.0, 0.25, 0.22)  # typical of bits per byte of small models
NAMES = ("E", "A", "B", "alpha", "beta")


def law(constants: tuple[float, ...], parameters: float, tokens: float) -> float:
    E, A, B, alpha, beta = constants
    return E + A / parameters**alpha + B / tokens**beta


def ladder(
    constants: tuple[float, ...],
    noise: float = 0.0,
    seed: int = 0,
    *,
    seeds: int = 1,
    sizes: tuple[float, float, int] = (3e5, 3e7, 5),
    lengths: tuple[float, float, int] = (1e7, 1e9, 4),
) -> list[Point]:
    """Return runs of all sizes and lengths, each (smallest, largest, count)."""
    rng = np.random.default_rng(seed)
    return [
        Point(size, length, law(constants, size, length) * math.exp(noise * rng.normal()))
        for size in np.geomspace(*sizes)
        for length in np.geomspace(*lengths)
        for _ in range(seeds)
    ]


@pytest.mark.parametrize("constants", [HOFFMANN, BITS, (0.3, 8.0, 900.0, 0.12, 0.45)])
def test_known_constants_are_recovered(constants: tuple[float, ...]) -> None:
    found = fit(ladder(constants), draws=20)
    assert [getattr(found, name) for name in NAMES] == pytest.approx(constants, rel=0.01)
    assert np.abs(found.residuals).max() < 1e-6
    assert found.predict(1e9, 2e10) == pytest.approx(law(constants, 1e9, 2e10), rel=1e-3)
    if constants is HOFFMANN:  # also at the paper's sizes
        found = fit(ladder(HOFFMANN, sizes=(7e7, 1e10, 6), lengths=(5e9, 5e11, 4)), draws=20)
        assert [getattr(found, name) for name in NAMES] == pytest.approx(HOFFMANN, rel=0.01)


@pytest.mark.parametrize(
    ("constants", "seeds", "ladders"),
    [
        pytest.param(BITS, 3, 4, marks=pytest.mark.slow),
        pytest.param(HOFFMANN, 1, 4, marks=pytest.mark.slow),
        *(pytest.param(*case, 100, marks=pytest.mark.slow) for case in ((HOFFMANN, 1), (BITS, 1), (BITS, 3))),
    ],
)
def test_intervals_cover_the_truth(constants: tuple[float, ...], seeds: int, ladders: int) -> None:
    """In nine of ten ladders, or in three of four."""
    rng = np.random.default_rng(0)
    covered, predicted, errors = np.zeros(5), 0, []
    for number in range(ladders):
        found = fit(ladder(constants, 0.003, number, seeds=seeds), draws=100 if ladders > 4 else 40)
        pairs = zip((found.intervals[name] for name in NAMES), constants, strict=True)
        covered += [low <= value <= high for (low, high), value in pairs]
        truth = law(constants, 6e7, 2e9)  # the next rung: twice the largest size and length
        low, high = found.predict_interval(6e7, 2e9)
        predicted += low <= truth * math.exp(0.003 * rng.normal()) <= high
        errors.append(abs(found.predict(6e7, 2e9) / truth - 1))
    assert min(covered.min(), predicted) >= (0.9 if ladders > 4 else 0.75) * ladders
    assert np.quantile(errors, 0.9) < 0.01
    assert ladders > 4 or (np.median(errors) < 0.005 and max(errors) < 0.01)


def test_no_other_minimiser_finds_a_lower_cost() -> None:
    points = ladder(BITS, 0.01, seed=4)
    found = fit(points, draws=20)
    sizes, lengths, losses = np.log([[point.parameters, point.tokens, point.loss] for point in points]).T

    def cost(at: np.ndarray) -> float:
        a, b, e, alpha, beta = at
        errors = np.abs(losses - np.logaddexp(np.logaddexp(a - alpha * sizes, b - beta * lengths), e))
        return float(np.where(errors < 1e-3, errors**2 / 2, 1e-3 * (errors - 5e-4)).sum()) * 1e3

    ours = cost(np.array([math.log(found.A), math.log(found.B), math.log(found.E), found.alpha, found.beta]))
    rng = np.random.default_rng(0)
    truth = np.array([math.log(25), math.log(30), math.log(0.75), 0.25, 0.22])
    starts = [truth + rng.normal(size=5) * [1, 1, 0.3, 0.05, 0.05] for _ in range(2)]
    theirs = min(minimize(cost, start, method="Nelder-Mead", options={"maxiter": 3000}).fun for start in starts)
    assert ours <= theirs * 1.001
    measured = np.exp(losses)
    fitted = [law((found.E, found.A, found.B, found.alpha, found.beta), p.parameters, p.tokens) for p in points]
    assert found.residuals == pytest.approx(np.log(measured / np.array(fitted)))


def test_the_optimal_size_has_the_lowest_loss() -> None:
    found = fit(ladder(HOFFMANN), draws=20)
    flops = 1e21
    parameters, tokens = found.optimal(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)

    def loss(log_size: float) -> float:
        return law(HOFFMANN, math.exp(log_size), flops / 6 / math.exp(log_size))

    best = minimize_scalar(loss, bounds=(math.log(1e6), math.log(1e12)), method="bounded")
    assert parameters == pytest.approx(math.exp(best.x), rel=0.02)
    assert found.predict(parameters, tokens) == pytest.approx(best.fun, rel=1e-4)
    low, high = fit(ladder(HOFFMANN, 0.003), draws=20).optimal_interval(flops)
    assert low < math.exp(best.x) < high

    def per_token(size: float) -> float:
        return 6 * size + 5e8  # with attention and the LM head

    counted = found.optimal_counted(flops, per_token)
    assert counted[1] == pytest.approx(flops / per_token(counted[0]))

    def counted_loss(log_size: float) -> float:
        return law(HOFFMANN, math.exp(log_size), flops / per_token(math.exp(log_size)))

    best = minimize_scalar(counted_loss, bounds=(math.log(1e6), math.log(1e12)), method="bounded")
    assert counted[0] == pytest.approx(math.exp(best.x), rel=0.02)
    assert found.optimal_counted(flops, lambda size: 6 * size) == pytest.approx((parameters, tokens), rel=2e-3)


def test_too_few_runs_are_refused() -> None:
    points = ladder(BITS)
    few = {"at least 6 runs, of 3 sizes and 3 lengths; there are 5 runs, of 2 sizes": points[:5]}
    few |= {"8 runs, of 2 sizes and 4 lengths": points[:8], r"1 length$": points[::4] * 2}
    for message, runs in few.items():
        with pytest.raises(ConfigError, match=message):
            fit(runs)
    lost = [Point(point.parameters, point.tokens, math.nan) for point in points[:4]]
    assert len(fit([*points[4:], *lost], draws=20).points) == 16


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=9, max_size=9))
@example([1.0, 4.0, 1.0, 0.125, 4.0, 5.0, 8.0, 4.0, 0.5])  # that depend on neither
def test_any_losses_give_finite_constants(losses: list[float]) -> None:
    cells = [(size, length) for size in (1e5, 1e6, 1e7) for length in (1e6, 1e7, 1e8)]
    found: Fit = fit([Point(*cell, loss) for cell, loss in zip(cells, losses, strict=True)], draws=4)
    assert np.isfinite(found.draws).all()
    assert np.isfinite([found.predict(1e8, 1e9), *found.predict_interval(1e8, 1e9)]).all()
    assert min(*found.optimal(1e18), *found.optimal_interval(1e18)) >= 1 - 1e-9
    assert max(*found.optimal(1e18), *found.optimal_interval(1e18)) <= 1e18 / 6 * (1 + 1e-9)


def test_the_fit_is_fast_and_deterministic() -> None:
    points = ladder(BITS, 0.003, seeds=3)
    started = time.perf_counter()
    first = fit(points, draws=20)
    assert time.perf_counter() - started < 10  # half a second on an idle core
    assert fit(points, draws=20).intervals == first.intervals
