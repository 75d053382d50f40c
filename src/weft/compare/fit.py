"""A scaling law fitted to a ladder of runs: L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, §3.3).

N are parameters, D the tokens read, and L the loss, in whatever unit it was measured. As in the paper, the Huber loss
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
DELTA = 1e-3
MIN_POINTS, MIN_VALUES = 6, 3  # of runs, and of different sizes and lengths
STARTS = 6  # of the grid's points, from which the law is fitted


class Point(NamedTuple):
    """A trained model: its parameters, the tokens it read, its loss on the held-out text, and what training took."""

    parameters: float
    tokens: float
    loss: float
    flops: float = math.nan


@dataclass(frozen=True)
class Fit:
    """A fitted law, with the 95 % `intervals` of its constants by name.

    `residuals` are log(measured / fitted), point by point. `draws` (draws, 5) are the constants, in the order of
    `CONSTANTS`, of ladders drawn with replacement from the measured one: runs of one size and length (other seeds)
    are drawn together, because what the law can't express is the same for all of them. In simulated ladders of 3 × 3 to
    5 × 4 runs the intervals cover the truth in 91 to 98 of 100.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    intervals: Mapping[str, tuple[float, float]]
    points: tuple[Point, ...]
    residuals: Array = field(repr=False)
    draws: Array = field(repr=False)

    def predict(self, parameters: float, tokens: float) -> float:
        """The loss of a model of that size after so many tokens."""
        return float(_law(self._constants, parameters, tokens)[0])

    def predict_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """The 95 % interval of what such a run would measure: the law's own uncertainty, and the scatter around it."""
        laws = np.log(_law(self.draws, parameters, tokens))
        # five constants have followed the points, so what is left over is smaller than the scatter of a new run
        runs = len(self.residuals)
        scatter = self.residuals * math.sqrt(runs / (runs - len(CONSTANTS)))
        low, high = ends((laws[:, None] + scatter).ravel())
        return math.exp(low), math.exp(high)

    def optimal(self, flops: float) -> tuple[float, float]:
        """The parameters and tokens of the lowest loss that FLOPs = 6ND allow (Hoffmann et al. 2022, eq. 4)."""
        parameters = float(_optimal_parameters(self._constants, flops)[0])
        return parameters, flops / 6 / parameters

    def optimal_interval(self, flops: float) -> tuple[float, float]:
        """The 95 % interval of the optimal number of parameters."""
        return ends(_optimal_parameters(self.draws, flops))

    def optimal_counted(self, flops: float, per_token: Callable[[float], float]) -> tuple[float, float]:
        """As `optimal`, where a token's training takes `per_token(parameters)` FLOPs instead of 6 a parameter."""

        def loss(size: float) -> float:
            return self.predict(math.exp(size), flops / per_token(math.exp(size)))

        centre, far = math.log(self.optimal(flops)[0]), math.log(1e3)
        parameters = math.exp(minimize_scalar(loss, bounds=(centre - far, centre + far), method="bounded").x)
        return parameters, flops / per_token(parameters)

    @property
    def _constants(self) -> Array:
        return np.array([[self.E, self.A, self.B, self.alpha, self.beta]])


def fit(points: Sequence[Point], draws: int = 200, seed: int = 0) -> Fit:
    """Fits the law to runs of several sizes and lengths. Runs without a finite loss are left out."""
    points = tuple(point for point in points if 0 < point.loss < math.inf)
    sizes, lengths = {point.parameters for point in points}, {point.tokens for point in points}
    if len(points) < MIN_POINTS or min(len(sizes), len(lengths)) < MIN_VALUES:
        found = f"{counted(len(points), 'run')}, of {counted(len(sizes), 'size')} and {counted(len(lengths), 'length')}"
        raise ConfigError(
            f"a scaling law needs at least {MIN_POINTS} runs, of {MIN_VALUES} sizes and {MIN_VALUES} lengths; "
            f"there are {found}"
        )
    ladder = _Ladder(points)
    every = np.arange(len(points))
    best = min((ladder.fitted(start, every) for start in ladder.starts()), key=lambda found: found.cost).x
    # sizes and lengths are drawn with replacement: all points of one count as often as it was drawn
    cells = list(dict.fromkeys((point.parameters, point.tokens) for point in points))
    own = [cells.index((point.parameters, point.tokens)) for point in points]
    times = np.random.default_rng(seed).multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=draws)
    drawn = [ladder.fitted(best, np.repeat(every, row[own])).x for row in times]
    constants = ladder.constants(np.array([best, *drawn]))
    intervals = {name: ends(constants[1:, column]) for column, name in enumerate(CONSTANTS)}
    E, A, B, alpha, beta = constants[0].tolist()
    return Fit(E, A, B, alpha, beta, intervals, points, -ladder.errors(best), constants[1:])


class _Ladder:
    """Points in logarithms (points,), sizes and lengths from their means, which keeps A and α apart.

    What is fitted is (5,): log A and log B at the mean size and length, log E, α, β. They have bounds, because a term
    that doesn't matter would wander off without end.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        logs = np.log([[point.parameters, point.tokens, point.loss] for point in points]).T
        self.middle = logs[:2].mean(axis=1)
        self.sizes, self.lengths = logs[:2] - self.middle[:, None]
        self.losses = logs[2]
        low, high = self.losses.min(), self.losses.max()
        self.bounds = np.array([low - 12, low - 12, low - 7, 0.01, 0.01]), np.array([high + 1, high + 1, high, 3, 3])

    def fitted(self, start: Array, rows: npt.NDArray[np.int64]) -> Any:
        """The minimum that is reached from a start (5,), over the points that are numbered in `rows`."""
        options = {"bounds": self.bounds, "x_scale": "jac", "loss": "huber", "f_scale": DELTA, "max_nfev": 50}
        return least_squares(lambda at: self.errors(at)[rows], start, lambda at: self.slopes(at)[rows], **options)

    def starts(self) -> list[Array]:
        """A grid of exponents, each with the least squares of the other three; the best few."""
        found = []
        for alpha, beta in product(np.geomspace(0.05, 1.5, 10), repeat=2):
            ones = np.ones_like(self.sizes)
            terms = np.stack([np.exp(-alpha * self.sizes), np.exp(-beta * self.lengths), ones], axis=1)
            linear, left_over = nnls(terms / np.exp(self.losses)[:, None], ones)  # relative errors
            start = [*np.log(np.maximum(linear, 1e-3 * np.exp(self.losses.min()))), alpha, beta]
            found.append((left_over, np.clip(start, *self.bounds)))
        return [start for _, start in sorted(found, key=lambda each: each[0])[:STARTS]]

    def terms(self, at: Array) -> Array:
        """(3, points): the logarithms of A/N^α, B/D^β and E."""
        a, b, e, alpha, beta = at
        return np.stack([a - alpha * self.sizes, b - beta * self.lengths, np.full_like(self.sizes, e)])

    def errors(self, at: Array) -> Array:
        """log(fitted / measured) of each point."""
        return np.logaddexp.reduce(self.terms(at)) - self.losses

    def slopes(self, at: Array) -> Array:
        """How errors change with what is fitted: (points, 5)."""
        terms = self.terms(at)
        size, length, rest = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([size, length, rest, -size * self.sizes, -length * self.lengths], axis=1)

    def constants(self, at: Array) -> Array:
        """(fits, 5) in the order of `CONSTANTS`."""
        a, b, e, alpha, beta = at.T
        columns = [e, a + alpha * self.middle[0], b + beta * self.middle[1]]
        return np.stack([*map(np.exp, columns), alpha, beta], axis=1)


def _law(constants: Array, parameters: float, tokens: float) -> Array:
    """The loss by constants (draws, 5)."""
    E, A, B, alpha, beta = constants.T
    return E + A / parameters**alpha + B / tokens**beta


def _optimal_parameters(constants: Array, flops: float) -> Array:
    """(draws,) for constants (draws, 5): one parameter at least, and one token.

    Losses that hardly fall with size and length leave small exponents, by which the optimum is divided: without these
    ends it could be any number, infinity among them.
    """
    _, A, B, alpha, beta = constants.T
    found = (np.log(alpha * A / (beta * B)) + beta * math.log(flops / 6)) / (alpha + beta)
    return np.exp(np.clip(found, 0, math.log(flops / 6)))
