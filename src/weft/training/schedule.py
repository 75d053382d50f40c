"""The learning rate as a function of the step alone. Steps count from 1: the first update is step 1."""

import math
from collections.abc import Callable
from typing import assert_never

from weft.recipe import optimizer as config

Decaying = config.Constant | config.LinearDecay | config.Cosine | config.WSD | config.StepDecay


def build(settings: config.Schedule, lr: float, steps: int, *, d_model: int) -> Callable[[int], float]:
    """Return the learning rate at each step of a run of `steps` steps."""
    if isinstance(settings, config.Noam):
        return lambda step: noam(step, d_model, settings.warmup, scale=settings.scale)
    warmup = settings.warmup or 0
    # 1/warmup at step 1, up to 1 at step `warmup`
    return lambda step: lr * min(step / warmup if warmup else 1.0, 1.0, _decay(settings, step, steps))


def noam(step: int, d_model: int, warmup: int, *, scale: float = 1.0) -> float:
    """Return d_model^−0.5 · min(step^−0.5, step · warmup^−1.5), highest at `warmup` (Vaswani et al. 2017, §5.3)."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def _decay(settings: Decaying, step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate, down to `floor` at the last step."""
    match settings:
        case config.Constant():
            return 1.0
        case config.LinearDecay():
            return 1.0 - (1.0 - settings.floor) * _progress(step, settings.warmup or 0, steps)
        case config.Cosine():  # (1 + cos πx)/2, x from 0 to 1 (Loshchilov and Hutter 2017)
            cosine = 0.5 * (1.0 + math.cos(math.pi * _progress(step, settings.warmup or 0, steps)))
            return settings.floor + (1.0 - settings.floor) * cosine
        case config.WSD():
            return 1.0 - (1.0 - settings.floor) * _progress(step, steps * (1.0 - settings.decay), steps)
        case config.StepDecay():
            return settings.factor ** max(0, math.ceil((step - settings.hold) / settings.every))
        case _:
            assert_never(settings)


def _progress(step: int, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (step - begin) / (end - begin))) if end > begin else float(step > begin)
