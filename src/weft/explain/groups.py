"""The parameters of a model in groups that mean something: by layer, and by what they are for."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")
CELL = re.compile(r"(recurrence|encoder|decoder)\.(?:weight|bias)_(?:ih|hh)_l(\d+)")


class Group(NamedTuple):
    """A `part` of a layer ("attention", "feedforward", "norms", "cell"), or around the layers, where `layer` is ""."""

    layer: str
    part: str


def group_of(name: str) -> Group:
    """Where a parameter belongs, by its name in the model."""
    if found := LAYER.fullmatch(name):
        stack, number, inside = found.groups()
        part = "norms" if "norm" in inside else inside.split(".")[0]
        return Group(f"{stack}.{number}", part)
    if found := CELL.match(name):
        stack, number = found.groups()
        return Group(f"{'layer' if stack == 'recurrence' else stack}.{number}", "cell")
    if ".projection." in name:
        return Group("", "embedding")
    if ".position." in name:
        return Group("", "positions")
    if "norm" in name and not name.startswith("output"):
        return Group("", "norms")
    first = name.split(".")[0]
    others = {"output": "head", "output_bias": "head", "source_embedding": "embedding", "ngrams": "embedding"}
    return Group("", others.get(first, first))


def grouped(model: nn.Module) -> Mapping[Group, list[nn.Parameter]]:
    """A model's parameters by group, in the model's order."""
    found: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(group_of(name), []).append(parameter)
    return found
