"""Bahdanau's score and context."""

from typing import Any

import torch
from torch import Tensor


def bahdanau(s: Tensor, h: Tensor, mask: Tensor, W_a: Tensor, U_a: Tensor, v_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the context (batch, d_h) and the weights α (batch, T) of the source words."""
    e = torch.tanh((s @ W_a.T)[:, None] + h @ U_a.T) @ v_a
    alpha = e.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    context = (alpha[..., None] * h).sum(dim=1)
    return context, alpha


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, n: int = 4, d_h: int = 6, n_a: int = 5) -> dict[str, Tensor]:
        mask = torch.arange(T)[None] < draw.integers(1, T + 1, B)[:, None]
        return {
            "s": draw.normal(B, n), "h": draw.normal(B, T, d_h), "mask": mask,
            "W_a": draw.normal(n_a, n), "U_a": draw.normal(n_a, d_h), "v_a": draw.normal(n_a),
        }  # fmt: skip

    yield "random", arguments(3, 5)
    yield "batch 1, length 1", arguments(1, 1)
    yield "all padding but one", arguments(2, 4) | {"mask": torch.tensor([[True, False, False, False]] * 2)}
    yield "large scores", (large := arguments(2, 3)) | {"v_a": 1000 * large["v_a"]}
