"""Copy everything that a run needs to resume into host memory: weights, optimizer state, random-number generators."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim


@dataclass(frozen=True)
class Snapshot:
    """Copy of all resumable state in host memory; training may continue while it is written."""

    step: int
    weights: dict[str, Tensor]
    tied: dict[str, str]  # alias → the name under which the shared tensor is in `weights`
    moments: dict[str, Tensor] | None
    random: dict[str, Tensor] | None
    state: str  # JSON


def snapshot(
    step: int,
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    *,
    notes: Mapping[str, Any],
    step_state: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy weights, optimizer state, random-number generators and `notes`; `step_state` is stored with the moments."""
    weights, tied = _untie(learned_state(model))
    moments = copies({**optimizer_state(optimizer, model), **(step_state or {})}) if optimizer is not None else None
    kind = None if optimizer is None else type(optimizer).__name__
    state = json.dumps({"step": step, "optimizer": kind, "notes": dict(notes)}, indent=1)
    random = random_state()
    return Snapshot(step=step, weights=copies(weights), tied=tied, moments=moments, random=random, state=state)


def size(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """Return the approximate size of a checkpoint in bytes."""
    tensors = [*_untie(learned_state(model))[0].values(), *optimizer_state(optimizer, model).values()]
    return sum(tensor.nbytes for tensor in tensors)


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without frozen parameters: those never change, and are stored with the base model."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory: safetensors refuses views, and training changes the originals."""
    return {name: torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()) for name, x in tensors.items()}


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, and a dict from alias to name for tensors stored under several names."""
    first, unique, tied = dict[tuple[Any, ...], str](), dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        storage = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and storage in first:
            tied[name] = first[storage]
        else:
            first[storage] = name
            unique[name] = tensor
    return unique, tied


def optimizer_state(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors named `moment/parameter`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    named = [(names[parameter], values) for parameter, values in optimizer.state.items()]
    return {f"{moment}/{name}": x for name, values in named for moment, x in values.items() if isinstance(x, Tensor)}


def load_optimizer_state(optimizer: optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the result of `optimizer_state` bit for bit; return the tensors that belong to no parameter, such as
    `scale/loss`, fp16's loss scale. Parameter groups keep the recipe's settings."""
    parameters = dict(model.named_parameters())
    default = next(iter(parameters.values())).device
    optimizer.state.clear()
    step_state = {}
    for key, value in tensors.items():
        moment, _, name = key.partition("/")
        parameter = parameters.get(name)
        device = default if parameter is None else parameter.device
        copy = torch.empty_like(value, device=device).copy_(value)  # not the file's pages
        if parameter is None:
            step_state[key] = copy
        else:
            optimizer.state[parameter][moment] = copy
    return step_state


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's random-number generators; training uses no others."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Restore the result of `random_state`."""
    torch.set_rng_state(state["cpu"])
    for name, value in state.items():
        if name.startswith("cuda:") and torch.cuda.is_available() and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, int(name[5:]))
