"""Everything that a run needs to continue, copied into memory: weights, the optimizer's state, random generators."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything resumable in the host's memory; training may go on while it is written."""

    step: int
    weights: dict[str, Tensor]
    tied: dict[str, str]
    moments: dict[str, Tensor] | None
    random: dict[str, Tensor] | None
    state: str  # JSON


def snapshot(
    step: int,
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    notes: Mapping[str, Any],
    step_state: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy weights, moments, random generators and `notes`; `step_state` is stored with the moments."""
    weights, tied = _untie(learned_state(model))
    moments = copies({**optimizer_state(optimizer, model), **(step_state or {})}) if optimizer is not None else None
    kind = None if optimizer is None else type(optimizer).__name__
    state = json.dumps({"step": step, "optimizer": kind, "notes": dict(notes)}, indent=1)
    return Snapshot(step, copies(weights), tied, moments, random_state(), state)


def size(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """About how many bytes a checkpoint takes on the disk."""
    tensors = [*_untie(learned_state(model))[0].values(), *optimizer_state(optimizer, model).values()]
    return sum(tensor.nbytes for tensor in tensors)


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """All that training may change. What is frozen was there before, and is kept where it came from."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own on the host: safetensors refuses views, and training must not change them."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()) for name, tensor in tensors.items()
    }


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and alias → name for those that are one tensor under several names."""
    first, kept, tied = dict[tuple[Any, ...], str](), dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    return kept, tied


def optimizer_state(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, `moment/parameter`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}/{names[parameter]}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_state(
    optimizer: optim.Optimizer, model: nn.Module, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Put back what `optimizer_state` gave, bit for bit; return the tensors that belong to no parameter. The groups'
    settings stay those of the recipe."""
    parameters = dict(model.named_parameters())
    anywhere = next(iter(parameters.values())).device
    optimizer.state.clear()
    step_state = {}
    for key, value in found.items():
        moment, _, name = key.partition("/")
        parameter = parameters.get(name)
        device = anywhere if parameter is None else parameter.device
        copy = torch.empty_like(value, device=device).copy_(value)
        if parameter is None:
            step_state[key] = copy
        else:
            optimizer.state[parameter][moment] = copy
    return step_state


def random_state() -> dict[str, Tensor]:
    """The states of torch's generators; nothing in training draws from any other."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state |= {f"cuda:{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    for name, value in state.items():
        if name.startswith("cuda:") and torch.cuda.is_available() and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, int(name[5:]))
