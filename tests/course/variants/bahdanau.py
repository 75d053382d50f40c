"""Correct answers to the exercise bahdanau in other manners."""

# mypy: ignore-errors
import torch


def einsum(s, h, mask, W_a, U_a, v_a):
    hidden = torch.einsum("bn,an->ba", s, W_a).unsqueeze(1) + torch.einsum("btd,ad->bta", h, U_a)
    e = torch.einsum("bta,a->bt", hidden.tanh(), v_a)
    alpha = torch.softmax(torch.where(mask, e, float("-inf")), 1)
    return torch.einsum("bt,btd->bd", alpha, h), alpha


def loop(s, h, mask, W_a, U_a, v_a):
    e = torch.stack([(torch.tanh(s @ W_a.T + h[:, j] @ U_a.T) * v_a).sum(-1) for j in range(h.shape[1])], dim=1)
    e = e.masked_fill(mask.logical_not(), -torch.inf)
    alpha = (e - e.logsumexp(1, keepdim=True)).exp()
    return sum(alpha[:, j, None] * h[:, j] for j in range(h.shape[1])), alpha


def as_a_dict(s, h, mask, W_a, U_a, v_a):
    e = (torch.tanh(torch.nn.functional.linear(s, W_a)[:, None] + torch.nn.functional.linear(h, U_a)) @ v_a[:, None])[
        ..., 0
    ]
    alpha = e.masked_fill(~mask, -torch.inf).softmax(-1)
    return {"context": (alpha[:, None] @ h)[:, 0], "alpha": alpha}
