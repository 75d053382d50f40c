"""Correct answers to the exercise word2vec in other manners."""

# mypy: ignore-errors
import torch


def softplus(v, u, negatives):
    loss = torch.nn.functional.softplus(-(u * v).sum()) + torch.nn.functional.softplus(negatives @ v).sum()
    return loss, torch.einsum("k,kd->d", (negatives @ v).sigmoid(), negatives) - (-(u @ v)).sigmoid() * u


def one_regression(v, u, negatives):
    rows = torch.cat([u[None], negatives])
    labels = torch.zeros(len(rows), dtype=v.dtype)
    labels[0] = 1
    scores = rows @ v
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
    return loss, rows.T @ (scores.sigmoid() - labels)


def by_autograd(v, u, negatives):
    w = v.detach().clone().requires_grad_()
    loss = -torch.nn.functional.logsigmoid(u.detach() @ w)
    for row in negatives.detach():
        loss = loss - torch.nn.functional.logsigmoid(-row @ w)
    return loss.detach(), torch.autograd.grad(loss, w)[0]
