"""Label smoothing."""

from typing import Any

import torch
from torch import Tensor


def label_smoothing(logits: Tensor, targets: Tensor, pad: int, eps: float) -> Tensor:
    """Return the mean smoothed cross-entropy of all targets but padding, a scalar."""
    log_p = logits.log_softmax(dim=-1)
    target = log_p.gather(-1, targets[:, None])[:, 0]
    losses = -(1 - eps) * target - eps * log_p.mean(dim=-1)
    loss = losses[targets != pad].mean()
    return loss


def cases(draw: Any) -> Any:
    def arguments(tokens: int, V: int, eps: float, scale: float = 1.0) -> dict[str, Any]:
        targets = draw.integers(0, V, tokens)
        targets[0], targets[-1] = 1, 0 if tokens > 1 else 1
        return {"logits": draw.normal(tokens, V, scale=scale), "targets": targets, "pad": 0, "eps": eps}

    yield "random", arguments(6, 5, 0.1)
    yield "one token", arguments(1, 4, 0.1)
    yield "no smoothing", arguments(5, 7, 0.0)
    yield "large logits", arguments(4, 5, 0.2, 1000.0)
    other = arguments(5, 4, 0.1)
    yield "another padding id", other | {"pad": 3, "targets": torch.tensor([1, 3, 0, 2, 3])}
