"""Learning a small addition to a model whose own weights stay as they are."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from weft.errors import ModelError, suggestion
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


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged(model: M) -> M:
    """A copy of the model in which the adapters are part of its weights: as one that never had any."""
    copy = deepcopy(model)
    for name, adapter in _adapters(copy).items():
        copy.set_submodule(name, adapter.merge())
    return copy.requires_grad_(True)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What was learned beside the frozen weights, by name: all that has to be kept of a fine-tuned model."""
    return {name: parameter.detach() for name, parameter in trainable(model).items()}


@torch.no_grad()
def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `adapter_state` gave, into a model with the same adapters."""
    own = trainable(model)
    for name in [*own, *tensors]:
        if name not in own:
            raise ModelError(f"adapter: {name} has no place in this model; {suggestion(name, own)}")
        if name not in tensors:
            raise ModelError(f"adapter: {name} is missing")
        if tensors[name].shape != own[name].shape:
            there, here = tuple(tensors[name].shape), tuple(own[name].shape)
            raise ModelError(f"adapter: {name} is {there}, but this model's is {here}; is the rank the same?")
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def _adapters(model: nn.Module) -> dict[str, LowRank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
