"""A scaling law fitted to a ladder of runs: L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, §3.3).

N are parameters, D the tokens read, and L the loss, in whatever unit it was measured. As in the paper, the Huber loss
(δ = 10⁻³) of log L is minimised, with log L as the log-sum-exp of its three terms, from a grid of starting points. The
minimiser is Levenberg's and Marquardt's, reweighted for Huber's loss, for all starting points at once: a fit takes
hundredths of a second, so the intervals can afford to fit hundreds of ladders drawn from the measured one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.compare.results import Array
from weft.errors import ConfigError, counted
from weft.evaluate.bootstrap import ends

CONSTANTS = ("E", "A", "B", "alpha", "beta")
_DELTA = 1e-3
_LEAST_POINTS, _LEAST_VALUES = 6, 3
_FREE = len(CONSTANTS)


@dataclass(frozen=True)
class Point:
    """A trained model: its parameters, the tokens it read, and its loss on the held-out text."""

    parameters: float
    tokens: float
    loss: float


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
        scatter = self.residuals * math.sqrt(len(self.residuals) / (len(self.residuals) - _FREE))
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
        """As `optimal`, where a token's training takes `per_token(parameters)` FLOPs instead of 6 a parameter.

        The loss along the budget has one minimum, which a finer and finer grid of sizes finds.
        """
        centre, width = math.log(self.optimal(flops)[0]), math.log(1e3)
        for _ in range(4):
            sizes = np.exp(np.linspace(centre - width, centre + width, 41))
            tokens = np.array([flops / per_token(float(size)) for size in sizes])
            centre = math.log(sizes[np.argmin(_law(self._constants, sizes, tokens))])
            width /= 16
        return math.exp(centre), flops / per_token(math.exp(centre))

    @property
    def _constants(self) -> Array:
        return np.array([[self.E, self.A, self.B, self.alpha, self.beta]])


def fit(points: Sequence[Point], draws: int = 500, seed: int = 0) -> Fit:
    """Fits the law to runs of several sizes and lengths. Runs without a finite loss are left out."""
    points = tuple(point for point in points if 0 < point.loss < math.inf)
    sizes, lengths = {point.parameters for point in points}, {point.tokens for point in points}
    if len(points) < _LEAST_POINTS or min(len(sizes), len(lengths)) < _LEAST_VALUES:
        raise ConfigError(
            f"a scaling law needs at least {_LEAST_POINTS} runs, of {_LEAST_VALUES} sizes and {_LEAST_VALUES} lengths; "
            f"there are {counted(len(points), 'run')}, of {counted(len(sizes), 'size')} "
            f"and {counted(len(lengths), 'length')}"
        )
    ladder = _Ladder.of(points)
    best = ladder.best()
    weights = ladder.resampled(points, draws, np.random.default_rng(seed))
    drawn = ladder.constants(ladder.minimise(np.repeat(best[None], draws, axis=0), weights, 40)[0])
    E, A, B, alpha, beta = ladder.constants(best[None])[0].tolist()
    intervals = {name: ends(drawn[:, column]) for column, name in enumerate(CONSTANTS)}
    residuals = ladder.losses - _terms(best[None], ladder.sizes, ladder.lengths)[0][0]
    return Fit(E, A, B, alpha, beta, intervals, points, residuals, drawn)


@dataclass(frozen=True)
class _Ladder:
    """Points in logarithms (points,), sizes and lengths from their means, which keeps A and α apart.

    What is fitted is (starts, 5): log A and log B at the mean size and length, log E, α, β. They stay between `lowest`
    and `highest`, because a term that doesn't matter would wander off without end.
    """

    sizes: Array
    lengths: Array
    losses: Array
    middle: tuple[float, float]
    lowest: Array
    highest: Array

    @classmethod
    def of(cls, points: Sequence[Point]) -> "_Ladder":
        sizes, lengths, losses = np.log([[point.parameters, point.tokens, point.loss] for point in points]).T
        middle = float(sizes.mean()), float(lengths.mean())
        low, high = losses.min(), losses.max()
        lowest = np.array([low - 12, low - 12, low - 7, 0.01, 0.01])
        highest = np.array([high + 1, high + 1, high, 3, 3])
        return cls(sizes - middle[0], lengths - middle[1], losses, middle, lowest, highest)

    def best(self) -> Array:
        """The fit (5,): a grid of exponents, each with the least squares of the other three, then the best few."""
        grid = np.geomspace(0.05, 1.5, 10)
        alpha, beta = (values.ravel()[:, None] for values in np.meshgrid(grid, grid))
        columns = [np.exp(-alpha * self.sizes), np.exp(-beta * self.lengths), np.ones((len(alpha), len(self.sizes)))]
        design = np.stack(columns, axis=-1) / np.exp(self.losses)[:, None]  # relative errors
        square = design.transpose(0, 2, 1) @ design + 1e-9 * np.eye(3)
        linear = np.linalg.solve(square, design.sum(axis=1)[..., None])[..., 0]
        starts = np.concatenate([np.log(np.maximum(linear, 1e-3 * math.exp(self.losses.min()))), alpha, beta], axis=1)
        even = np.ones((1, len(self.sizes)))
        found, costs = self.minimise(np.clip(starts, self.lowest, self.highest), even, 15)
        found, costs = self.minimise(found[np.argsort(costs)[:8]], even, 150)
        return found[costs.argmin()]

    def resampled(self, points: Sequence[Point], draws: int, rng: np.random.Generator) -> Array:
        """How often each point (draws, points) counts when sizes and lengths are drawn with replacement."""
        cells = {(point.parameters, point.tokens): None for point in points}
        numbers = {cell: number for number, cell in enumerate(cells)}
        weights = rng.multinomial(len(cells), np.full(len(cells), 1 / len(cells)), size=draws).astype(np.float64)
        return weights[:, [numbers[point.parameters, point.tokens] for point in points]]

    def minimise(self, starts: Array, weights: Array, steps: int) -> tuple[Array, Array]:
        """Minima (starts, 5) and their costs (starts,), for weights (starts or 1, points)."""
        at, damping = starts.copy(), np.full(len(starts), 1e-2)
        fitted, parts = _terms(at, self.sizes, self.lengths)
        errors = self.losses - fitted
        costs = _huber(errors, weights)
        for _ in range(steps):
            slopes = [parts[..., 0], parts[..., 1], parts[..., 2]]
            slopes += [-parts[..., 0] * self.sizes, -parts[..., 1] * self.lengths]
            jacobian = np.stack(slopes, axis=-1)
            # beyond δ Huber's loss is linear: a square whose weight falls with the error
            weighed = jacobian * (weights * np.minimum(1, _DELTA / np.maximum(np.abs(errors), 1e-300)))[..., None]
            square = weighed.transpose(0, 2, 1) @ jacobian
            diagonal = np.einsum("sii->si", square)
            damped = damping[:, None] * (diagonal + 1e-9 * diagonal.sum(axis=1, keepdims=True) + 1e-30)
            down = weighed.transpose(0, 2, 1) @ errors[..., None]
            step = np.linalg.solve(square + damped[:, None] * np.eye(_FREE), down)[..., 0]
            tried = np.clip(at + step, self.lowest, self.highest)
            fitted, new_parts = _terms(tried, self.sizes, self.lengths)
            new_errors = self.losses - fitted
            new_costs = _huber(new_errors, weights)
            better = new_costs < costs
            at[better], parts[better], errors[better] = tried[better], new_parts[better], new_errors[better]
            costs = np.where(better, new_costs, costs)
            damping = np.clip(np.where(better, damping * 0.3, damping * 4), 1e-10, 1e10)
        return at, costs

    def constants(self, at: Array) -> Array:
        """(starts, 5) in the order of `CONSTANTS`."""
        a, b, e, alpha, beta = at.T
        return np.stack(
            [np.exp(e), np.exp(a + alpha * self.middle[0]), np.exp(b + beta * self.middle[1]), alpha, beta], axis=1
        )


def _terms(at: Array, sizes: Array, lengths: Array) -> tuple[Array, Array]:
    """log L (starts, points), and each term's part of L (starts, points, 3)."""
    a, b, e, alpha, beta = (column[:, None] for column in at.T)
    logs = np.stack(np.broadcast_arrays(a - alpha * sizes, b - beta * lengths, e), axis=-1)
    top = logs.max(axis=-1, keepdims=True)
    powers = np.exp(logs - top)
    total = powers.sum(axis=-1, keepdims=True)
    return (top + np.log(total))[..., 0], powers / total


def _huber(errors: Array, weights: Array) -> Array:
    size = np.abs(errors)
    return (weights * np.where(size < _DELTA, errors**2 / 2, _DELTA * (size - _DELTA / 2))).sum(axis=1)


def _law(constants: Array, parameters: float | Array, tokens: float | Array) -> Array:
    """The loss by constants (draws, 5) at one size and length, or by one (1, 5) at many."""
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
