"""Correct answers to the exercise accumulation in other manners."""

# mypy: ignore-errors
import torch


def at_once(inputs, targets, W, pad):
    W = W.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(torch.cat(inputs) @ W, torch.cat(targets), ignore_index=pad)
    return torch.autograd.grad(loss, W)[0]


def summed_losses(inputs, targets, W, pad):
    W, count = W.clone().requires_grad_(), 0
    for x, y in zip(inputs, targets, strict=True):
        torch.nn.functional.cross_entropy(x @ W, y, ignore_index=pad, reduction="sum").backward()
        count += (y != pad).sum()
    return W.grad / count


def token_by_token(inputs, targets, W, pad):
    total, count = torch.zeros_like(W), 0
    for x, y in zip(inputs, targets, strict=True):
        for row, target in zip(x, y.tolist(), strict=True):
            if target == pad:
                continue
            delta = torch.softmax(row @ W, 0)
            delta[target] -= 1
            total, count = total + torch.outer(row, delta), count + 1
    return total / count
