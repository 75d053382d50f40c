"""Correct answers to the exercise rotary in other manners."""

# mypy: ignore-errors
import torch


def complex_numbers(x, m, base):
    theta = torch.pow(base, -torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    turn = torch.polar(torch.ones(len(m), len(theta), dtype=x.dtype), torch.outer(m.to(x.dtype), theta))
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(z * turn).flatten(-2)


def slide(x, m, base):
    d = x.shape[-1]
    angle = m.to(x.dtype)[:, None] / base ** ((torch.arange(d) // 2 * 2).to(x.dtype) / d)
    swapped = torch.empty_like(x)
    swapped[..., 0::2], swapped[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    return x * torch.cos(angle) + swapped * torch.sin(angle)


def matrices(x, m, base):
    d, out = x.shape[-1], torch.zeros_like(x)
    for t, position in enumerate(m.tolist()):
        for i in range(d // 2):
            a = torch.tensor(position * base ** (-2 * i / d), dtype=x.dtype)
            R = torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])])
            out[:, t, 2 * i : 2 * i + 2] = x[:, t, 2 * i : 2 * i + 2] @ R.T
    return out
