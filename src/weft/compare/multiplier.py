"""Compute multiplier: how many times a contender's compute the baseline needs for the same loss.

Both curves are only interpolated, never extrapolated, and read at the lowest loss that both reach. Between rungs, the
logarithm of the compute is a monotone cubic in the logarithm of the loss (Fritsch & Carlson 1980, with the slopes of
Fritsch & Butland 1984). With rungs a factor of 3 apart it follows curves of the form E + A/C^a to about 1 %; linear
interpolation is several percent off near E.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.compare.jobs import Result
from weft.evaluate.bootstrap import DRAWS, Array, ends, resample

BEYOND = "beyond the measured range on both sides"


@dataclass(frozen=True)
class Curve:
    """Cost of the held-out text against the compute of training."""

    amounts: Array  # (rungs,) FLOPs, ascending
    nats: Array  # (rungs, seeds, sections)
    bytes: Array  # (sections,)

    @classmethod
    def of(cls, result: Result) -> "Curve":
        """Build a contender's curve. Seeds that did not finish at every share are left out."""
        rows = [{outcome.seed: outcome for outcome in result.at(share)} for share in result.shares]
        seeds = sorted(set.intersection(*map(set, rows))) if rows else []
        if not seeds:
            return cls(np.zeros(0), np.zeros((0, 0, 0)), np.zeros(0))
        amounts = [float(np.mean([row[seed].flops for seed in seeds])) for row in rows]
        nats = np.array([[row[seed].nats for seed in seeds] for row in rows], dtype=np.float64)
        return cls(np.array(amounts), nats, np.array(rows[0][seeds[0]].bytes, dtype=np.float64))

    @property
    def bits_per_byte(self) -> Array:
        """Bits per byte over all seeds and sections, (rungs,)."""
        return (self.nats.sum(axis=2) / math.log(2) / self.bytes.sum()).mean(axis=1)


@dataclass(frozen=True)
class Multiplier:
    """Compute multiplier with its 95 % interval, read at `loss` bits per byte.

    The contender reached that loss with `share` of its largest amount. `beyond` is set if the curves reach no common
    loss. "above": the contender is better with its smallest amount than the baseline with its largest, so `value` is a
    lower bound and `high` is infinite. "below": the contender is worse with its largest amount than the baseline with
    its smallest, so `value` is an upper bound and `low` is 0. An interval that extends beyond the measured range has
    such ends too. With one seed the variation between seeds is unknown, and both ends are NaN. `at_full` is the
    multiplier at the contender's lowest loss, None if the baseline never reaches it.
    """

    value: float
    low: float
    high: float
    loss: float
    share: float
    beyond: Literal["above", "below"] | None = None
    at_full: float | None = None

    def text(self) -> str:
        """Format for a table: '2.1× (1.8–2.5)', 'more than 27×'."""
        if self.beyond:
            return f"{'more' if self.beyond == 'above' else 'less'} than {factor_text(self.value)}×"
        return f"{factor_text(self.value)}× ({bounds_text(self.low, self.high)})"


def factor_text(value: float) -> str:
    """Format with two significant digits, from 10 on as an integer: '0.052', '2.1', '27', '1,300'."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:#.2g}"


def bounds_text(low: float, high: float) -> str:
    """Format an interval, with enough digits to tell its ends apart, and words for an end beyond the measured range."""
    if math.isnan(low):
        return "one seed, so no interval"
    if low > 0 and math.isfinite(high):
        pairs = [(factor_text(low), factor_text(high)), *((f"{low:#.{n}g}", f"{high:#.{n}g}") for n in (3, 4))]
        return next((f"{start}–{end}" for start, end in pairs if start != end), f"{pairs[0][0]} in all draws")
    if low > 0 or math.isfinite(high):
        return f"at least {factor_text(low)}" if low > 0 else f"at most {factor_text(high)}"
    return BEYOND


def multiplier(contender: Curve, baseline: Curve, *, draws: int = DRAWS, seed: int = 0) -> Multiplier | None:
    """Return the contender's multiplier against the baseline, with an interval over seeds and sections.

    A rung that is no better than a smaller one is ignored, because the smaller amount already reaches its loss. Return
    None if a curve has no compute (an n-gram model) or no finite loss, or if both have a single point.
    """
    ours, theirs = _valid_rungs(contender), _valid_rungs(baseline)
    if ours is None or theirs is None or len(ours.amounts) == len(theirs.amounts) == 1:
        return None
    mine, other = (curve.bits_per_byte[None] for curve in (ours, theirs))
    value, loss, amount = (float(array[0]) for array in _read((mine, ours.amounts), (other, theirs.amounts)))
    drawn = resample([list(ours.nats), list(theirs.nats)], ours.bytes, draws, seed=seed)
    low, high = ends(_read((drawn[0], ours.amounts), (drawn[1], theirs.amounts))[0])
    if min(ours.nats.shape[1], theirs.nats.shape[1]) == 1:
        low = high = math.nan
    share = min(amount / float(ours.amounts[-1]), 1.0)
    if value == math.inf:
        value = float(theirs.amounts[-1] / ours.amounts[0])
        return Multiplier(value, min(value, low), math.inf, loss=loss, share=share, beyond="above")
    if value == 0:
        value = float(theirs.amounts[0] / ours.amounts[-1])
        return Multiplier(value, 0.0, max(value, high), loss=loss, share=share, beyond="below")
    return Multiplier(value, low, high, loss=loss, share=share, at_full=value if mine.min() >= other.min() else None)


def _read(ours: tuple[Array, Array], theirs: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Read pairs of losses (draws, rungs) and amounts (rungs,) at the lowest loss that both curves reach.

    Return, (draws,) each: the multipliers, ∞ or 0 beyond the range; the losses; the contender's amounts.
    """
    target = np.maximum(ours[0].min(axis=1), theirs[0].min(axis=1))
    mine, needed = _amounts_for(*ours, target), _amounts_for(*theirs, target)
    values = needed / mine
    values[ours[0][:, 0] < theirs[0].min(axis=1)] = math.inf
    values[theirs[0][:, 0] < ours[0].min(axis=1)] = 0.0
    return values, target, mine


def _valid_rungs(curve: Curve) -> Curve | None:
    """Return the rungs with a positive, distinct amount and a finite loss."""
    if curve.nats.ndim != 3 or not curve.nats.size:
        return None
    loss = curve.bits_per_byte
    good = np.flatnonzero(np.isfinite(curve.amounts) & (curve.amounts > 0) & np.isfinite(loss) & (loss > 0))
    if not len(good):
        return None
    amounts, first = np.unique(curve.amounts[good], return_index=True)
    return Curve(amounts, curve.nats[good][first], curve.bytes)


def _amounts_for(losses: Array, amounts: Array, target: Array) -> Array:
    """Return the amounts (draws,), or nearest ends, that losses (draws, rungs) need for a target (draws,)."""
    best = np.minimum.accumulate(losses, axis=1)  # only rungs better than all before count
    falls = np.concatenate([np.ones((len(losses), 1), bool), best[:, 1:] < best[:, :-1]], axis=1)
    needed = np.empty(len(losses))
    for pattern in np.unique(falls, axis=0):  # all draws with the same rungs together
        rows = (falls == pattern).all(axis=1)
        y = -np.log(losses[rows][:, pattern])
        at = np.clip(-np.log(target[rows]), y[:, 0], y[:, -1])
        needed[rows] = np.exp(_monotone_cubic(y, np.log(amounts[pattern]), at))
    return needed


def _monotone_cubic(x: Array, y: Array, at: Array) -> Array:
    """Evaluate curves through x (draws, knots) and y (knots,), both ascending, at `at` (draws,): (draws,)."""
    # equals scipy's PchipInterpolator, of which a thousand, one per x, would take a second
    if len(y) == 1:
        return np.repeat(y, len(at))
    h = np.diff(x)
    chords = np.diff(y) / h
    slopes = np.empty_like(x)
    if len(y) == 2:
        slopes[:] = chords
    else:
        before, after = h[:, :-1], h[:, 1:]
        first, second = 2 * after + before, after + 2 * before
        # the weighted harmonic mean of the chords on both sides never overshoots
        slopes[:, 1:-1] = (first + second) / (first / chords[:, :-1] + second / chords[:, 1:])
        slopes[:, 0] = _end_slope(h[:, :2], chords[:, :2])
        slopes[:, -1] = _end_slope(h[:, :-3:-1], chords[:, :-3:-1])
    rows = np.arange(len(at))
    piece = np.clip((at[:, None] >= x).sum(axis=1) - 1, 0, len(y) - 2)
    width = h[rows, piece]
    t = (at - x[rows, piece]) / width
    rise = t * t * (3 - 2 * t)
    bend = t * (1 - t) * width * ((1 - t) * slopes[rows, piece] - t * slopes[rows, piece + 1])
    return y[piece] + rise * (y[piece + 1] - y[piece]) + bend


def _end_slope(widths: Array, chords: Array) -> Array:
    """Return the slope at an end, from the two intervals next to it, nearest first, (draws, 2): that of the parabola
    through three points, but at least 0."""
    (h, next_h), (chord, next_chord) = widths.T, chords.T
    return np.maximum(((2 * h + next_h) * chord - h * next_chord) / (h + next_h), 0)
