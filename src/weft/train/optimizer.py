"""Optimizers built from their settings. Tensors of two or more dimensions decay; gains and biases do not."""

from typing import Any

from torch import Tensor, nn, optim

from weft.train import config


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices (embeddings among them) with decay, vectors and scalars without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(settings: config.AdamW, model: nn.Module) -> optim.Optimizer:
    """AdamW; one fused kernel updates all parameters. The rate is set at every step."""
    groups = decay_groups(model, settings.weight_decay)
    return optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def adam(settings: config.Adam, model: nn.Module) -> optim.Optimizer:
    """Adam without decay."""
    return optim.Adam(decay_groups(model, 0.0), lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def sgd(settings: config.SGD, model: nn.Module) -> optim.Optimizer:
    """SGD with momentum."""
    return optim.SGD(decay_groups(model, settings.weight_decay), lr=0.0, momentum=settings.momentum, fused=True)


def set_rate(optimizer: optim.Optimizer, lr: float) -> None:
    """The learning rate of the next update, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_tensors(optimizer: optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """The optimizer's memory as named tensors, `moment/parameter`. names: id of a parameter → its name."""
    return {
        f"{key}/{names[id(parameter)]}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_state_tensors(optimizer: optim.Optimizer, names: dict[int, str], tensors: dict[str, Tensor]) -> None:
    """Put back what `state_tensors` gave. The groups' settings stay those of the recipe."""
    state: dict[int, dict[str, Tensor]] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        moment, _, name = key.partition("/")
        moments.setdefault(name, {})[moment] = value
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(ordered):
        if names[id(parameter)] in moments:
            state[index] = moments[names[id(parameter)]]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
