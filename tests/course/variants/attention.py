"""Correct answers to the exercise attention in other manners."""

# mypy: ignore-errors
import math

import numpy as np
import torch


def einsum(Q, K, V, mask):
    scores = torch.einsum("btd,bsd->bts", Q, K) * Q.shape[-1] ** -0.5
    scores = torch.where(mask, scores, torch.full_like(scores, -math.inf))
    return torch.einsum("bts,bsd->btd", torch.softmax(scores, -1), V)


def fused(Q, K, V, mask):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=mask)


def loops(Q, K, V, mask):
    output = torch.zeros(*Q.shape[:2], V.shape[-1], dtype=Q.dtype)
    for b in range(Q.shape[0]):
        for t in range(Q.shape[1]):
            scores = [Q[b, t] @ K[b, s] / math.sqrt(Q.shape[-1]) for s in range(K.shape[1]) if mask[b, t, s]]
            top = max(scores)
            weights = [(score - top).exp() for score in scores]
            values = [V[b, s] for s in range(K.shape[1]) if mask[b, t, s]]
            output[b, t] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return output


def with_numpy(Q, K, V, mask):
    q, k, v, m = (x.detach().numpy() for x in (Q, K, V, mask))
    scores = np.where(m, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v
