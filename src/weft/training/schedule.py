"""The learning rate as a function of the step alone. Steps count from 1: the first update is step 1."""

import math
from collections.abc import Callable
from typing import assert_never

from weft.recipe import config


def build(settings: config.Schedule, lr: float, steps: int, d_model: int) -> Callable[[int], float]:
    """The learning rate at each step of a run of `steps` steps."""
    match settings:
        case config.Constant():
            return lambda step: constant(step, lr, settings.warmup or 0)
        case config.Linear():
            return lambda step: linear(step, steps, lr, settings)
        case config.Cosine():
            return lambda step: cosine(step, steps, lr, settings)
        case config.WSD():
            return lambda step: wsd(step, steps, lr, settings)
        case config.Noam():
            return lambda step: noam(step, d_model, settings.warmup, settings.scale)
        case _:
            assert_never(settings)


def _rise(step: int, warmup: int) -> float:
    """1/warmup at step 1, up to 1 at step `warmup`."""
    return min(1.0, step / warmup) if warmup else 1.0


def _done(step: int, begin: float, end: float) -> float:
    """How much of begin … end has passed, within 0 … 1."""
    return min(1.0, max(0.0, (step - begin) / (end - begin))) if end > begin else float(step > begin)


def constant(step: int, lr: float, warmup: int) -> float:
    """lr, after a linear rise."""
    return lr * _rise(step, warmup)


def linear(step: int, steps: int, lr: float, settings: config.Linear) -> float:
    """A rise to lr, then a straight fall to floor · lr at the last step."""
    warmup = settings.warmup or 0
    return lr * min(_rise(step, warmup), 1.0 - (1.0 - settings.floor) * _done(step, warmup, steps))


def cosine(step: int, steps: int, lr: float, settings: config.Cosine) -> float:
    """A rise to lr, then floor + (1 − floor) · (1 + cos πx)/2 of it, x from 0 to 1 (Loshchilov and Hutter 2017)."""
    warmup = settings.warmup or 0
    fall = 0.5 * (1.0 + math.cos(math.pi * _done(step, warmup, steps)))
    return lr * min(_rise(step, warmup), settings.floor + (1.0 - settings.floor) * fall)


def wsd(step: int, steps: int, lr: float, settings: config.WSD) -> float:
    """A rise to lr, a plateau, and a straight fall to floor · lr over the last `decay` part of the steps."""
    fall = _done(step, steps * (1.0 - settings.decay), steps)
    return lr * min(_rise(step, settings.warmup or 0), 1.0 - (1.0 - settings.floor) * fall)


def noam(step: int, d_model: int, warmup: int, scale: float = 1.0) -> float:
    """d_model^−0.5 · min(step^−0.5, step · warmup^−1.5), highest at step = warmup (Vaswani et al. 2017, §5.3)."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
