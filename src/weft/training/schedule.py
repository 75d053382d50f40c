"""The learning rate as a function of the step alone. Steps count from 1: the first update is step 1."""

import math
from collections.abc import Callable
from typing import assert_never

from weft.recipe import optimizer as config

Falling = config.Constant | config.LinearDecay | config.Cosine | config.WSD | config.StepDecay


def build(settings: config.Schedule, lr: float, steps: int, d_model: int) -> Callable[[int], float]:
    """The learning rate at each step of a run of `steps` steps."""
    if isinstance(settings, config.Noam):
        return lambda step: noam(step, d_model, settings.warmup, settings.scale)
    warmup = settings.warmup or 0
    # 1/warmup at step 1, up to 1 at step `warmup`
    return lambda step: lr * min(step / warmup if warmup else 1.0, 1.0, _fall(settings, step, steps))


def noam(step: int, d_model: int, warmup: int, scale: float = 1.0) -> float:
    """d_model^−0.5 · min(step^−0.5, step · warmup^−1.5), highest at step = warmup (Vaswani et al. 2017, §5.3)."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def _fall(settings: Falling, step: int, steps: int) -> float:
    """The share of the peak that is left, down to `floor` at the last step."""
    match settings:
        case config.Constant():
            return 1.0
        case config.LinearDecay():
            return 1.0 - (1.0 - settings.floor) * _done(step, settings.warmup or 0, steps)
        case config.Cosine():  # (1 + cos πx)/2, x from 0 to 1 (Loshchilov and Hutter 2017)
            fall = 0.5 * (1.0 + math.cos(math.pi * _done(step, settings.warmup or 0, steps)))
            return settings.floor + (1.0 - settings.floor) * fall
        case config.WSD():
            return 1.0 - (1.0 - settings.floor) * _done(step, steps * (1.0 - settings.decay), steps)
        case config.StepDecay():
            return settings.factor ** max(0, math.ceil((step - settings.hold) / settings.every))
        case _:
            assert_never(settings)


def _done(step: int, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (step - begin) / (end - begin))) if end > begin else float(step > begin)
