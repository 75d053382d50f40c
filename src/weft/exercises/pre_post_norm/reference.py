"""Pre- and post-norm."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def pre_post_norm(x: Tensor, W1: Tensor, W2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of the post-norm and of the pre-norm block, (batch, T, d) each."""

    def f(z: Tensor) -> Tensor:
        return (z @ W1).relu() @ W2

    def norm(z: Tensor) -> Tensor:
        return F.layer_norm(z, (z.shape[-1],))

    post = norm(x + f(x))
    pre = x + f(norm(x))
    return post, pre


def cases(draw: Any) -> Any:
    def arguments(B: int, T: int, d: int, scale: float = 1.0) -> dict[str, Tensor]:
        return {"x": draw.normal(B, T, d, scale=scale) + 1, "W1": draw.normal(d, 2 * d), "W2": draw.normal(2 * d, d)}

    yield "random", arguments(2, 3, 4)
    yield "batch 1, length 1", arguments(1, 1, 3)
    yield "large inputs", arguments(2, 2, 5, 100.0)
    yield "a wider layer", arguments(1, 4, 8)
