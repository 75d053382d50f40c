"""Fine-tuning with an adapter: a small addition is learned, and the model's own weights stay as they are."""

from collections.abc import Collection
from copy import deepcopy
from typing import TypeVar

from torch import nn

from weft.errors import ModelError
from weft.nn.config import LoRA
from weft.nn.lora import LowRank, block_linears
from weft.nn.lora_targets import targets

M = TypeVar("M", bound=nn.Module)


def add_adapters(model: nn.Module, settings: LoRA, fresh: Collection[str] = ()) -> list[str]:
    """Freeze `model` and put trained low-rank matrices beside the layers that `settings` names; their names.

    In place. The model computes what it did before, until it is trained. Parameters that are `fresh`, a new head's,
    know nothing yet and are trained too.
    """
    linears = block_linears(model)
    if not linears:
        raise ModelError("adapter: it needs a model made of Transformer blocks")
    if _adapters(model):
        raise ModelError("adapter: this model has adapters already; merge them first")
    names = targets(settings, linears)
    head = list(model.get_submodule("output").parameters()) if settings.head else []
    if settings.head and not head:
        raise ModelError("adapter.head: this head has no weights of its own, it shares the embeddings'")
    model.requires_grad_(False)
    for name in names:
        model.set_submodule(name, LowRank(linears[name], settings))
    new = [parameter for name, parameter in model.named_parameters() if name in fresh]
    for parameter in [*head, *new]:
        parameter.requires_grad_(True)
    return names


def merged(model: M) -> M:
    """A copy of the model in which the adapters are part of its weights: as one that never had any."""
    copy = deepcopy(model)
    for name, adapter in _adapters(copy).items():
        copy.set_submodule(name, adapter.merge())
    return copy.requires_grad_(True)


def _adapters(model: nn.Module) -> dict[str, LowRank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
