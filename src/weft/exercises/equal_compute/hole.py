import math


def equal_compute(
    baseline: list[tuple[float, float]], other: list[tuple[float, float]], compute: float
) -> float | None:
    """Return how many times less compute `other` needs for the baseline's loss at `compute`."""
    target = ...  # the baseline's loss at `compute`, interpolated on a logarithmic axis of compute
    needed = ...  # the compute at which the other model reaches this loss, interpolated in the same manner
    multiplier = ...  # compute / needed: how many times less compute it needs; None if it never reaches the loss
    return multiplier
