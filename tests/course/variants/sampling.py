"""Correct answers to the exercise sampling in other manners."""

# mypy: ignore-errors
import torch


def row_by_row(logits, temperature, k, top_p):
    rows = []
    for row in logits:
        p = torch.softmax(row / temperature, 0)
        order = p.argsort(descending=True).tolist()
        order = order[:k] if k else order
        kept, total, mass = [], 0.0, p[order].sum()
        for token in order:
            if kept and total >= top_p and top_p < 1:
                break
            kept.append(token)
            total += float(p[token] / mass)
        q = torch.zeros_like(p)
        q[kept] = p[kept] / p[kept].sum()
        rows.append(q)
    return torch.stack(rows)


def thresholds(logits, temperature, k, top_p):
    z = logits / temperature
    if k > 0:
        z = torch.where(z >= z.sort(-1).values[:, -k, None], z, -torch.inf)
    if top_p < 1:
        ordered = z.sort(-1, descending=True).values
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        lowest = torch.where(before < top_p, ordered, torch.inf).amin(-1, keepdim=True)
        z = torch.where(z >= lowest, z, -torch.inf)
    return z.softmax(-1)


def ranks(logits, temperature, k, top_p):
    p = (logits / temperature).softmax(-1)
    above = (p[:, None] > p[:, :, None]).to(p.dtype)  # which tokens are likelier than each
    if k:
        p = p * (above.sum(-1) < k)
        p = p / p.sum(-1, keepdim=True)
    mass = (above * p[:, None]).sum(-1)  # of all likelier tokens
    if top_p < 1:
        p = p * ((mass < top_p) | (above.sum(-1) == 0))
    return p / p.sum(-1, keepdim=True)
