"""Correct answers to the exercise warmup in other manners."""

# mypy: ignore-errors
import math

import torch


def branches(step, d_model, warmup):
    if step < warmup:
        return step / (warmup * math.sqrt(warmup) * math.sqrt(d_model))
    return 1 / math.sqrt(step * d_model)


def with_torch(step, d_model, warmup):
    values = torch.tensor([step**-0.5, step * warmup**-1.5], dtype=torch.float64)
    return values.min() / d_model**0.5


def peak_times(step, d_model, warmup):
    peak = (d_model * warmup) ** -0.5
    return peak * min(step / warmup, (warmup / step) ** 0.5)
