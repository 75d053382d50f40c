"""The learning rate as a function of the step alone. Steps count from 1: the first update is step 1."""

import math


def _rise(step: int, warmup: int) -> float:
    """1/warmup at step 1, up to 1 at step `warmup`."""
    return min(1.0, step / warmup) if warmup else 1.0


def _done(step: int, begin: float, end: float) -> float:
    """How much of begin … end has passed, within 0 … 1."""
    return min(1.0, max(0.0, (step - begin) / (end - begin))) if end > begin else float(step > begin)


def constant(step: int, lr: float, warmup: int) -> float:
    """lr, after a linear rise."""
    return lr * _rise(step, warmup)


def linear(step: int, steps: int, lr: float, warmup: int, floor: float) -> float:
    """A rise to lr, then a straight fall to floor · lr at the last step."""
    return lr * min(_rise(step, warmup), 1.0 - (1.0 - floor) * _done(step, warmup, steps))


def cosine(step: int, steps: int, lr: float, warmup: int, floor: float) -> float:
    """A rise to lr, then floor + (1 − floor) · (1 + cos πx)/2 of it, x from 0 to 1 (Loshchilov and Hutter 2017)."""
    fall = 0.5 * (1.0 + math.cos(math.pi * _done(step, warmup, steps)))
    return lr * min(_rise(step, warmup), floor + (1.0 - floor) * fall)


def wsd(step: int, steps: int, lr: float, warmup: int, decay: float, floor: float) -> float:
    """A rise to lr, a plateau, and a straight fall to floor · lr over the last `decay` part of the steps."""
    return lr * min(_rise(step, warmup), 1.0 - (1.0 - floor) * _done(step, steps * (1.0 - decay), steps))


def noam(step: int, d_model: int, warmup: int, scale: float = 1.0) -> float:
    """d_model^−0.5 · min(step^−0.5, step · warmup^−1.5), highest at step = warmup (Vaswani et al. 2017, §5.3)."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
