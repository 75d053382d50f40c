"""Correct answers to the exercise lstm in other manners."""

# mypy: ignore-errors
import torch


def by_torch(x, h, c, W, b):
    d_x = x.shape[1]
    return torch.lstm_cell(x, (h, c), W[:, :d_x], W[:, d_x:], b, torch.zeros_like(b))


def by_slices(x, h, c, W, b):
    n, d_x = h.shape[1], x.shape[1]
    a = [
        x @ W[k * n : (k + 1) * n, :d_x].T + h @ W[k * n : (k + 1) * n, d_x:].T + b[k * n : (k + 1) * n]
        for k in range(4)
    ]
    c = torch.sigmoid(a[1]) * c + torch.sigmoid(a[0]) * torch.tanh(a[2])
    return torch.sigmoid(a[3]) * torch.tanh(c), c


def by_half_tanh(x, h, c, W, b):
    i, f, g, o = (torch.einsum("oi,bi->bo", W, torch.cat((x, h), 1)) + b).view(len(x), 4, -1).unbind(1)

    def s(z):
        return 0.5 + 0.5 * torch.tanh(z / 2)

    c_next = torch.addcmul(s(f) * c, s(i), g.tanh())
    return s(o) * c_next.tanh(), c_next
