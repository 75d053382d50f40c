"""The weights that training starts from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.nn.attention import CrossAttention, SelfAttention
from weft.nn.config import Init, NormalInit
from weft.nn.feedforward import Gated, Plain
from weft.nn.position import Learned, T5Bias


@torch.no_grad()
def initialise(model: nn.Module, init: Init, d_model: int, layers: int) -> None:
    """Fill every matrix of `model`; biases become 0 and gains stay 1.

    `layers` counts the blocks that write into one residual stream, for GPT-2's 1/√(2·layers).
    """
    stacked = {}  # matrices that lie one above the other in a parameter
    into_residual = set()
    for module in model.modules():
        if isinstance(module, SelfAttention):
            keys = module.kv_heads * module.d_head
            stacked[module.qkv] = [module.heads * module.d_head, keys, keys]
            for table in (module.relative_keys, module.relative_values):
                if table is not None:
                    nn.init.xavier_uniform_(table)
        elif isinstance(module, CrossAttention):
            stacked[module.kv] = [module.kv_heads * module.d_head] * 2
        elif isinstance(module, Gated):
            stacked[module.gate_up] = [module.gate_up.out_features // 2] * 2
        if isinstance(module, SelfAttention | CrossAttention):
            into_residual.add(module.out)
        elif isinstance(module, Plain | Gated):
            into_residual.add(module.down)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            shrink = (2 * layers) ** -0.5 if module in into_residual else 1.0
            for matrix in module.weight.split(stacked.get(module, [module.out_features])):
                _fill(matrix, init, shrink)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding | Learned | T5Bias):
            module.weight.normal_(std=embedding_deviation(init, d_model))


def embedding_deviation(init: Init, d_model: int) -> float:
    """How far the rows of a table of embeddings spread."""
    return init.std if isinstance(init, NormalInit) else d_model**-0.5


def _fill(matrix: Tensor, init: Init, shrink: float) -> None:
    if isinstance(init, NormalInit):
        matrix.normal_(std=init.std * (shrink if init.depth_scaled else 1.0))
    else:
        nn.init.xavier_uniform_(matrix)


@contextmanager
def hollow() -> Iterator[None]:
    """Models built in here have shapes and no numbers (torch's meta device); whoever builds them fills them."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Draws nothing: to draw what has no memory, torch would import its compiler first, which takes seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "xavier_uniform_", "kaiming_uniform_"):
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
