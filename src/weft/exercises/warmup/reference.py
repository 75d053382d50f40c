"""The learning rate of 2017."""

from typing import Any


def warmup(step: int, d_model: int, warmup: int) -> float:
    """Return the learning rate of a step."""
    rate = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    return rate


def cases(draw: Any) -> Any:
    yield "the peak", {"step": 4000, "d_model": 512, "warmup": 4000}
    yield "the first step", {"step": 1, "d_model": 512, "warmup": 4000}
    yield "after the peak", {"step": 100_000, "d_model": 1024, "warmup": 4000}
    yield "random", {"step": draw.random.randrange(2, 9000), "d_model": 64, "warmup": draw.random.randrange(5, 5000)}
    yield "a warm-up of one step", {"step": 7, "d_model": 3, "warmup": 1}
