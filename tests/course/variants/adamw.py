"""Correct answers to the exercise adamw in other manners."""

# mypy: ignore-errors
import math

import torch


def by_torch(theta, g, m, v, t, lr, beta1, beta2, eps, decay):
    weight = torch.nn.Parameter(theta.clone())
    weight.grad = g.clone()
    optimizer = torch.optim.AdamW([weight], lr, (beta1, beta2), eps, weight_decay=decay)
    optimizer.state[weight] = {"step": torch.tensor(t - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    state = optimizer.state[weight]
    return weight.detach(), state["exp_avg"], state["exp_avg_sq"]


def shrink_first(theta, g, m, v, t, lr, beta1, beta2, eps, decay):
    m, v = torch.lerp(g, m, beta1), beta2 * v + (1 - beta2) * g * g
    scale = lr / (1 - math.pow(beta1, t))
    root = torch.sqrt(v) / math.sqrt(1 - math.pow(beta2, t))
    return theta * (1 - lr * decay) - scale * m / (root + eps), m, v


def as_a_dict(theta, g, m, v, t, lr, beta1, beta2, eps, decay):
    new_m = m + (1 - beta1) * (g - m)
    new_v = v + (1 - beta2) * (g.square() - v)
    update = (new_m / (1 - beta1**t)) / ((new_v / (1 - beta2**t)) ** 0.5 + eps) + decay * theta
    return {"m": new_m, "v": new_v, "theta": theta - lr * update}
