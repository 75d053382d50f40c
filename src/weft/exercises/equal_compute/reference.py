"""Read a comparison at equal compute."""

import math
from typing import Any


def at(compute: float, curve: list[tuple[float, float]]) -> float:
    for (c0, l0), (c1, l1) in zip(curve, curve[1:], strict=False):
        if c0 <= compute <= c1:
            share = (math.log(compute) - math.log(c0)) / (math.log(c1) - math.log(c0))
            return l0 + share * (l1 - l0)
    return curve[-1][1]


def equal_compute(
    baseline: list[tuple[float, float]], other: list[tuple[float, float]], compute: float
) -> float | None:
    """Return how many times less compute `other` needs for the baseline's loss at `compute`."""
    target = at(compute, baseline)
    multiplier = None
    for (c0, l0), (c1, l1) in zip(other, other[1:], strict=False):
        if l1 <= target <= l0:
            share = (target - l0) / (l1 - l0)
            needed = math.exp(math.log(c0) + share * (math.log(c1) - math.log(c0)))
            multiplier = compute / needed
    return multiplier


def cases(draw: Any) -> Any:
    slow = [(1e15, 4.0), (1e16, 3.5), (1e17, 3.2), (1e18, 3.0)]
    fast = [(1e15, 3.6), (1e16, 3.1), (1e17, 2.9), (1e18, 2.7)]
    yield "a better model", {"baseline": slow, "other": fast, "compute": 3e17}
    yield "a worse model", {"baseline": fast, "other": slow, "compute": 2.5e15}
    yield "the same model", {"baseline": slow, "other": slow, "compute": 4e16}
    yield "never reached", {"baseline": fast, "other": slow, "compute": 9e17}
    yield "already better at the start", {"baseline": slow, "other": fast, "compute": 2e15}
    yield (
        "random",
        {
            "baseline": slow,
            "other": [(c, loss - 0.05 - 0.1 * draw.random.random() * 0.5) for c, loss in slow],
            "compute": 2e17,
        },
    )
