"""Correct answers to the exercise split_mlp in other manners."""

# mypy: ignore-errors
import torch


def unsplit(X, A, B, g_Z, processes):
    X = X.clone().requires_grad_()
    Z = torch.nn.functional.gelu(X @ A) @ B
    return Z.detach(), torch.autograd.grad(Z, X, g_Z)[0]


def by_slices(X, A, B, g_Z, processes):
    width = A.shape[1] // processes
    Z, g_X = 0, 0
    normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
    for r in range(processes):
        own = slice(r * width, (r + 1) * width)
        pre = X @ A[:, own]
        Z = Z + (pre * normal.cdf(pre)) @ B[own]
        g_X = g_X + (g_Z @ B[own].T * (normal.cdf(pre) + pre * normal.log_prob(pre).exp())) @ A[:, own].T
    return Z, g_X


def as_a_list(X, A, B, g_Z, processes):
    pre = torch.stack([X @ a for a in A.split(A.shape[1] // processes, 1)])
    rows = B.reshape(processes, -1, B.shape[1])
    cdf = 0.5 * torch.erfc(-pre / 2**0.5)
    slope = cdf + pre * torch.exp(-0.5 * pre.square()) * (2 * torch.pi) ** -0.5
    g = torch.einsum("td,rfd->rtf", g_Z, rows) * slope
    return [torch.einsum("rtf,rfd->td", pre * cdf, rows), torch.cat(list(g), -1) @ A.T]
