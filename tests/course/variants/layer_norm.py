"""Correct answers to the exercise layer_norm in other manners."""

# mypy: ignore-errors
import torch


def by_autograd(x, gain, bias, eps, g_y):
    x, gain, bias = (each.clone().requires_grad_() for each in (x, gain, bias))
    y = torch.nn.functional.layer_norm(x, gain.shape, gain, bias, eps)
    return (y.detach(), *torch.autograd.grad(y, (x, gain, bias), g_y))


def sums(x, gain, bias, eps, g_y):
    n = x.shape[1]
    centred = x - x.sum(1, keepdim=True) / n
    r = (centred.pow(2).sum(1, keepdim=True) / n + eps).rsqrt()
    x_hat, g = centred * r, g_y * gain
    g_x = r / n * (n * g - g.sum(1, keepdim=True) - x_hat * (g * x_hat).sum(1, keepdim=True))
    return gain * x_hat + bias, g_x, torch.einsum("rn,rn->n", g_y, x_hat), g_y.sum(0)


def row_by_row(x, gain, bias, eps, g_y):
    ys, g_xs, g_gain, g_bias = [], [], torch.zeros_like(gain), torch.zeros_like(bias)
    for row, g in zip(x, g_y, strict=True):
        s = (row.var(unbiased=False) + eps).sqrt()
        z = (row - row.mean()) / s
        J = (torch.eye(len(row), dtype=x.dtype) - 1 / len(row) - torch.outer(z, z) / len(row)) / s
        ys.append(gain * z + bias)
        g_xs.append(J @ (g * gain))
        g_gain += g * z
        g_bias += g
    return torch.stack(ys), torch.stack(g_xs), g_gain, g_bias
