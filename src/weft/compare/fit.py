"""Fit a scaling law to a ladder of runs: L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, §3.3).

N is the number of parameters, D the number of tokens read, L the loss in any unit. As in the paper, the Huber loss
(δ = 10⁻³) of log L is minimised, with log L as the log-sum-exp of its three terms, from a grid of starting points.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, minimize_scalar, nnls

from weft.errors import ConfigError, counted
from weft.evaluate.bootstrap import Array, ends

CONSTANTS = ("E", "A", "B", "alpha", "beta")
HUBER_DELTA = 1e-3
MIN_POINTS = 6  # refuse to fit fewer runs
MIN_VALUES = 3  # refuse to fit fewer distinct sizes or lengths
STARTS = 6  # best grid points that the fit starts from


class Point(NamedTuple):
    """Training run: parameters, tokens read, loss on the held-out text, and FLOPs."""

    parameters: float
    tokens: float
    loss: float
    flops: float = math.nan


@dataclass(frozen=True)
class Fit:
    """Fitted law. In simulated ladders of 3 × 3 to 5 × 4 runs the intervals cover the truth 91 to 98 times in 100."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    intervals: Mapping[str, tuple[float, float]]  # 95 % intervals of the constants by name
    points: tuple[Point, ...]
    residuals: Array = field(repr=False)  # log(measured / fitted) of each point
    draws: Array = field(repr=False)  # (draws, 5) constants of `CONSTANTS`, fitted to ladders drawn with replacement

    def predict(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss of a model with this many parameters after this many tokens."""
        return float(_law(self._constants, parameters, tokens)[0])

    def predict_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Return the 95 % interval of such a run's loss: the uncertainty of the law and the scatter around it."""
        laws = np.log(_law(self.draws, parameters, tokens))
        # five constants were fitted to the points, so the residuals are smaller than the scatter of a new run
        runs = len(self.residuals)
        low, high = ends((laws[:, None] + self.residuals * math.sqrt(runs / (runs - len(CONSTANTS)))).ravel())
        return math.exp(low), math.exp(high)

    def optimal(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens with the lowest loss for FLOPs = 6ND (Hoffmann et al. 2022, eq. 4)."""
        parameters = float(_optimal_parameters(self._constants, flops)[0])
        return parameters, flops / 6 / parameters

    def optimal_interval(self, flops: float) -> tuple[float, float]:
        """Return the 95 % interval of the optimal number of parameters."""
        return ends(_optimal_parameters(self.draws, flops))

    def optimal_counted(self, flops: float, per_token: Callable[[float], float]) -> tuple[float, float]:
        """Return the optimal parameters and tokens if a token takes `per_token(parameters)` FLOPs instead of 6N."""

        def loss(size: float) -> float:
            return self.predict(math.exp(size), flops / per_token(math.exp(size)))

        centre, width = math.log(self.optimal(flops)[0]), math.log(1e3)
        parameters = math.exp(minimize_scalar(loss, bounds=(centre - width, centre + width), method="bounded").x)
        return parameters, flops / per_token(parameters)

    @property
    def _constants(self) -> Array:
        return np.array([[self.E, self.A, self.B, self.alpha, self.beta]])


def fit(points: Sequence[Point], draws: int = 200, seed: int = 0) -> Fit:
    """Fit the law to runs of several sizes and lengths. Runs without a finite loss are left out."""
    points = tuple(point for point in points if 0 < point.loss < math.inf)
    sizes, lengths = {point.parameters for point in points}, {point.tokens for point in points}
    if len(points) < MIN_POINTS or min(len(sizes), len(lengths)) < MIN_VALUES:
        given = f"{counted(len(points), 'run')}, of {counted(len(sizes), 'size')} and {counted(len(lengths), 'length')}"
        needed = f"{MIN_POINTS} runs, of {MIN_VALUES} sizes and {MIN_VALUES} lengths"
        raise ConfigError(f"a scaling law needs at least {needed}; there are {given}")
    ladder = _Ladder(points)
    all_rows = np.arange(len(points))
    best = min((ladder.minimise(start, all_rows) for start in ladder.starts()), key=lambda found: found.cost).x
    # pairs of size and length are drawn with replacement, each with all of its points, which share the law's misfit
    cells = list(dict.fromkeys((point.parameters, point.tokens) for point in points))
    cell_of = [cells.index((point.parameters, point.tokens)) for point in points]
    times = np.random.default_rng(seed).multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=draws)
    drawn = [ladder.minimise(best, np.repeat(all_rows, row[cell_of])).x for row in times]
    constants = ladder.constants(np.array([best, *drawn]))
    intervals = {name: ends(constants[1:, column]) for column, name in enumerate(CONSTANTS)}
    values = dict(zip(CONSTANTS, constants[0].tolist(), strict=True))
    return Fit(**values, intervals=intervals, points=points, residuals=-ladder.errors(best), draws=constants[1:])


class _Ladder:
    """Logarithms (points,) of losses, and of sizes and lengths relative to their means, which decorrelates A and α.

    The fitted vector is (5,): log A and log B at the mean size and length, log E, α, β. It is bounded, because a term
    without influence would diverge.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        logs = np.log([[point.parameters, point.tokens, point.loss] for point in points]).T
        self.middle = logs[:2].mean(axis=1)
        self.sizes, self.lengths = logs[:2] - self.middle[:, None]
        self.losses = logs[2]
        low, high = self.losses.min(), self.losses.max()
        self.bounds = np.array([low - 12, low - 12, low - 7, 0.01, 0.01]), np.array([high + 1, high + 1, high, 3, 3])

    def minimise(self, start: Array, rows: npt.NDArray[np.int64]) -> Any:
        """Return the least-squares result from a start (5,), over the points with indices `rows`."""
        options = {"bounds": self.bounds, "x_scale": "jac", "loss": "huber", "f_scale": HUBER_DELTA, "max_nfev": 50}
        return least_squares(lambda at: self.errors(at)[rows], start, lambda at: self.slopes(at)[rows], **options)

    def starts(self) -> list[Array]:
        """Return the best points of a grid of exponents, with the other three constants by linear least squares."""
        starts = []
        for alpha, beta in product(np.geomspace(0.05, 1.5, 10), repeat=2):
            ones = np.ones_like(self.sizes)
            terms = np.stack([np.exp(-alpha * self.sizes), np.exp(-beta * self.lengths), ones], axis=1)
            linear, residual = nnls(terms / np.exp(self.losses)[:, None], ones)  # relative errors
            start = [*np.log(np.maximum(linear, 1e-3 * np.exp(self.losses.min()))), alpha, beta]
            starts.append((residual, np.clip(start, *self.bounds)))
        return [start for _, start in sorted(starts, key=lambda pair: pair[0])[:STARTS]]

    def terms(self, at: Array) -> Array:
        """Return the logarithms of A/N^α, B/D^β and E, (3, points)."""
        a, b, e, alpha, beta = at
        return np.stack([a - alpha * self.sizes, b - beta * self.lengths, np.full_like(self.sizes, e)])

    def errors(self, at: Array) -> Array:
        """Return log(fitted / measured) of each point."""
        return np.logaddexp.reduce(self.terms(at)) - self.losses

    def slopes(self, at: Array) -> Array:
        """Return the Jacobian of the errors, (points, 5)."""
        terms = self.terms(at)
        size, length, floor = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([size, length, floor, -size * self.sizes, -length * self.lengths], axis=1)

    def constants(self, at: Array) -> Array:
        """Convert fitted vectors to constants in the order of `CONSTANTS`, (fits, 5)."""
        a, b, e, alpha, beta = at.T
        columns = [e, a + alpha * self.middle[0], b + beta * self.middle[1]]
        return np.stack([*map(np.exp, columns), alpha, beta], axis=1)


def _law(constants: Array, parameters: float, tokens: float) -> Array:
    """Return the losses (draws,) by constants (draws, 5)."""
    E, A, B, alpha, beta = constants.T
    return E + A / parameters**alpha + B / tokens**beta


def _optimal_parameters(constants: Array, flops: float) -> Array:
    """Return the optimal number of parameters (draws,), at least one, for constants (draws, 5)."""
    _, A, B, alpha, beta = constants.T
    log_parameters = (np.log(alpha * A / (beta * B)) + beta * math.log(flops / 6)) / (alpha + beta)
    # with exponents near zero, of a loss that hardly depends on size and length, the optimum would be unbounded
    return np.exp(np.clip(log_parameters, 0, math.log(flops / 6)))
