"""How far a metric would move with another text of the same kind: the bootstrap over sections (Efron 1979).

A metric of a text is a sum of costs over a sum of sizes. Sections are drawn again, as many as there are and each as
often as chance has it, and the metric is taken each time; the middle 95 % of what comes out is the interval.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS = 1000
LEVEL = 0.95
Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """Where a metric lies in 95 of 100 texts that are drawn like this one."""

    low: float
    high: float


def weights(sections: int, draws: int = DRAWS, rng: np.random.Generator | None = None) -> Array:
    """How often each section is drawn: (draws, sections), rows of a multinomial that sum to `sections`.

    Without a generator the same rows come each time.
    """
    rng = rng or np.random.default_rng(0)
    drawn = rng.integers(0, sections, (draws, sections))
    drawn += sections * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * sections).reshape(draws, sections).astype(np.float64)


def ratio_interval(costs: npt.ArrayLike, sizes: npt.ArrayLike, drawn: Array) -> Interval:
    """The interval of Σ costs ÷ Σ sizes over sections (S,), drawn together by `weights` (draws, S)."""
    above, below = drawn @ np.asarray(costs, dtype=np.float64), drawn @ np.asarray(sizes, dtype=np.float64)
    ratios = above[below > 0] / below[below > 0]
    return ends(ratios)


def ends(values: Array) -> Interval:
    """The middle 95 % of draws (draws,): percentiles, which may be infinite."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="nearest")  # linear would take ∞ − ∞
    return Interval(float(low), float(high))
