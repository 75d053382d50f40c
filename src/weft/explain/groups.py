"""Parameters of a model, grouped by layer and by purpose."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")
CELL = re.compile(r"(recurrence|encoder|decoder)\.(?:weight|bias)_(?:ih|hh)_l(\d+)")
DIRECTION = re.compile(r"(ahead|back)\.(\d+)\..+")  # of ELMo
OUTSIDE_LAYERS = {"output": "head", "output_bias": "head", "source_embedding": "embedding", "ngrams": "embedding"}


class ParameterGroup(NamedTuple):
    """`part` of a layer ("attention", "feedforward", "norms", "cell"); `layer` is "" for parts outside the layers."""

    layer: str
    part: str


def group_of(name: str) -> ParameterGroup:
    """Return the group of a parameter, by its name in the model."""
    if match := LAYER.fullmatch(name):
        stack, number, inside = match.groups()
        return ParameterGroup(f"{stack}.{number}", "norms" if "norm" in inside else inside.split(".")[0])
    if match := CELL.match(name):
        stack, number = match.groups()
        return ParameterGroup(f"{'layer' if stack == 'recurrence' else stack}.{number}", "cell")
    if match := DIRECTION.fullmatch(name):
        return ParameterGroup(f"{'forward' if match[1] == 'ahead' else 'backward'}.{match[2]}", "cell")
    if ".projection." in name:
        return ParameterGroup("", "embedding")
    if ".position." in name:
        return ParameterGroup("", "positions")
    if "norm" in name and not name.startswith("output"):
        return ParameterGroup("", "norms")
    first = name.split(".")[0]
    return ParameterGroup("", OUTSIDE_LAYERS.get(first, first))


def parameter_groups(model: nn.Module) -> Mapping[ParameterGroup, list[nn.Parameter]]:
    """Return a model's parameters by group, in the model's order."""
    groups: dict[ParameterGroup, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(group_of(name), []).append(parameter)
    return groups
