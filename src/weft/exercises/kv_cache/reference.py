"""The key–value cache."""

import math
from typing import Any

import torch
from torch import Tensor


def kv_cache(
    x: Tensor, K_cache: Tensor, V_cache: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (batch, T, d) of causal attention, and all keys and values (batch, S + T, d)."""
    S, T = K_cache.shape[1], x.shape[1]
    K = torch.cat([K_cache, x @ W_k], dim=1)
    V = torch.cat([V_cache, x @ W_v], dim=1)
    future = torch.arange(S + T) > torch.arange(S, S + T)[:, None]
    scores = (x @ W_q) @ K.mT / math.sqrt(x.shape[-1])
    scores = scores.masked_fill(future, -math.inf)
    output = scores.softmax(dim=-1) @ V
    return output, K, V


def cases(draw: Any) -> Any:
    def arguments(B: int, S: int, T: int, d: int = 4) -> dict[str, Tensor]:
        caches = {"K_cache": draw.normal(B, S, d), "V_cache": draw.normal(B, S, d)}
        return {"x": draw.normal(B, T, d), **caches, **{name: draw.normal(d, d) for name in ("W_q", "W_k", "W_v")}}

    yield "several new tokens", arguments(2, 3, 3)
    yield "one new token", arguments(2, 5, 1)
    yield "an empty cache", arguments(1, 0, 4)
    yield "batch 1, one token, empty cache", arguments(1, 0, 1)
