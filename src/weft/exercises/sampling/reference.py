"""Temperature, top-k and top-p."""

import math
from typing import Any

import torch
from torch import Tensor


def sampling(logits: Tensor, temperature: float, k: int, top_p: float) -> Tensor:
    """Return the distribution (batch, V) to sample from."""
    scaled = logits / temperature
    by_k = scaled
    if k:
        by_k = scaled.masked_fill(scaled < scaled.topk(k).values[:, -1:], -math.inf)
    sorted_p, order = by_k.softmax(dim=-1).sort(dim=-1, descending=True)
    drop = (sorted_p.cumsum(dim=-1) - sorted_p >= top_p) & (top_p < 1)
    drop[:, 0] = False
    by_p = by_k.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
    p = by_p.softmax(dim=-1)
    return p


def cases(draw: Any) -> Any:
    def arguments(B: int, V: int, temperature: float, k: int, top_p: float) -> dict[str, Any]:
        return {"logits": draw.normal(B, V, scale=2.0), "temperature": temperature, "k": k, "top_p": top_p}

    yield "all three", arguments(3, 8, 0.7, 5, 0.8)
    yield "temperature alone", arguments(2, 5, 1.5, 0, 1.0)
    yield "top-k alone", arguments(2, 6, 1.0, 3, 1.0)
    yield "top-p alone", arguments(3, 7, 1.0, 0, 0.6)
    yield "a tiny p keeps one token", arguments(2, 5, 2.0, 0, 0.01)
    yield "k = V, batch 1", arguments(1, 4, 0.5, 4, 0.9)
    yield "large logits", (large := arguments(2, 5, 0.5, 3, 0.9)) | {"logits": 1000 * large["logits"]}
