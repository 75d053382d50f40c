"""A split model that is only used from here on: plain tensors, and a sum after each product that is split by rows.

DTensor works out at every product what has to travel, and a step of one token would spend most of its time on that.
Without gradients it is known once the model is split: this process's part of each matrix, and what to sum.
"""

from collections.abc import Callable
from typing import cast

from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from weft.models.base import LanguageModel, T
from weft.nn.linear import Embedding, Linear
from weft.parallel.mesh import Mesh
from weft.parallel.plan import placement, plan
from weft.parallel.ranks import Ranks


def keep_local(model: LanguageModel, mesh: Mesh) -> None:
    """Let a model that `tensor.split` has split over a mesh's tensor axis go without DTensor, once it has its weights.

    Its processes then have to choose the same tokens. They get the same logits, to the bit, but a GPU adds up
    probabilities in an order of its own each time: what the first process chooses is what all go on with.
    """
    ranks, patterns = mesh.axis("tensor"), plan(model.config)
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            module.register_parameter(key, nn.Parameter(here.detach(), requires_grad=False))
        placed = placement(name, patterns)
        if placed is not None:
            module._forward_pre_hooks.clear()  # DTensor's, around what it computes
            module._forward_hooks.clear()
        if placed == "row":
            module.forward = _row(cast(Linear, module), ranks)
        elif placed == "word":
            module.forward = _word(cast(Embedding, module), ranks)

    def agree(chosen: T) -> T:
        return mesh.world.share(lambda: chosen)

    model.parts, model.agree = ranks.ranks, agree  # type: ignore[method-assign]


def _row(linear: Linear, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """(…, inputs) of which this process has a part → (…, outputs)."""

    def forward(x: Tensor) -> Tensor:
        total = F.linear(x, linear.weight)
        distributed.all_reduce(total, group=ranks.group)
        return total if linear.bias is None else total + linear.bias

    return forward


def _word(table: Embedding, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """tokens (batch, time) → (batch, time, d_model); each token's row is in one process, and the others add zeros."""
    first = ranks.rank * -(-table.num_embeddings // ranks.ranks)

    def forward(tokens: Tensor) -> Tensor:
        own = tokens - first
        elsewhere = (own < 0) | (own >= table.weight.shape[0])
        found = F.embedding(own.masked_fill(elsewhere, 0), table.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        distributed.all_reduce(found, group=ranks.group)
        return found

    return forward
