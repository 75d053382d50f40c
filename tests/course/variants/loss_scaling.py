"""Correct answers to the exercise loss_scaling in other manners."""

# mypy: ignore-errors
import math

import torch


def early_return(theta, scaled, scale, lr, good, interval):
    if torch.isnan(scaled).any() or torch.isinf(scaled).any():
        return theta.clone(), scale * 0.5, 0
    good += 1
    grow = good >= interval
    return theta - lr / scale * scaled, scale * (2 if grow else 1), 0 if grow else good


def by_sum(theta, scaled, scale, lr, good, interval):
    total = float(scaled.abs().sum())
    if not math.isfinite(total):
        return theta + 0, scale / 2, 0
    counter = (good + 1) % interval
    return theta.sub(scaled.div(scale), alpha=lr), scale if counter else 2 * scale, counter


def with_where(theta, scaled, scale, lr, good, interval):
    ok = torch.isfinite(scaled).all()
    new = torch.where(ok, theta - lr * torch.nan_to_num(scaled, 0.0, 0.0, 0.0) / scale, theta)
    after = good + 1 if ok else 0
    if ok and after == interval:
        return {"theta": new, "scale": scale * 2.0, "good": 0}
    return {"theta": new, "scale": scale if ok else scale / 2, "good": after}
