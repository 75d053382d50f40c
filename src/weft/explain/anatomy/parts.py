"""Parts of a model in the order of computation, each with its formula, shapes, parameters and source lines.

They are described from the settings and from the model itself, built without memory: parameters are counted in its
modules, so they sum to the model's total.
"""

import inspect
import json
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any, cast

from torch import nn

from weft.config import Config

PACKAGES = Path(__file__).parents[3]
# by name: formula, shape, keys and, of some, name, box and detail of a part
TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Code:
    """Source lines, and their location `place` as file:line."""

    place: str
    text: str


@dataclass(frozen=True)
class ModelPart:
    """Part of a model, from its input to its output."""

    name: str
    formula: str = ""
    shape: str = ""
    own: int = 0  # parameters that none of its `parts` has
    keys: str = ""  # settings that chose it, separated by spaces
    by: tuple[Callable[..., Any], ...] = ()  # functions and classes that compute it
    parts: tuple["ModelPart", ...] = ()
    repeats: int = 1
    note: str = ""
    box: str | None = None  # title of its box in a diagram; by default its name, if it has a `detail`
    detail: str = ""
    skips: int = 0  # parts before a sum that it skips
    loops: bool = False  # it reads its previous output
    reads: bool = False  # it reads the source

    @property
    def parameters(self) -> int:
        return self.own + sum(part.repeats * part.parameters for part in self.parts)

    @property
    def title(self) -> str:
        """Text of the part's box in a diagram; empty if it has none."""
        return (self.name.capitalize() if self.detail else "") if self.box is None else self.box

    @property
    def code(self) -> tuple[Code, ...]:
        return tuple(map(source_lines, self.by))

    def settings(self, config: Config) -> list[str]:
        """Return the settings that chose the part as a recipe writes them, such as `model.norm.kind = "layer"`."""
        lines = []
        for key in self.keys.split():
            value = reduce(lambda value, step: getattr(value, step, None), key.split("."), cast(Any, config))
            number = f"{value:g}" if isinstance(value, float) else value
            text = json.dumps(value) if isinstance(value, str | bool) else number
            lines += [] if value is None else [f"model.{key} = {text}"]
        return lines


def part(entry: str, words: Mapping[str, object], *, own: int = 0, by: Sequence[Any] = (), note: str = "") -> ModelPart:
    """Return the part `entry` of parts.toml, with its texts filled by `words`."""
    texts: dict[str, Any] = {"name": entry} | {key: text.format_map(words) for key, text in TABLE[entry].items()}
    return ModelPart(**texts, own=own, by=tuple(by), note=note)


def size(*members: nn.Module | nn.Parameter | None) -> int:
    """Return the number of parameters in these modules and parameters."""
    present = (each for each in members if each is not None)
    weights = ((each,) if isinstance(each, nn.Parameter) else each.parameters() for each in present)
    return sum(weight.numel() for each in weights for weight in each)


@cache
def source_lines(function: Callable[..., Any]) -> Code:
    """Return the source of a function or class of weft or PyTorch."""
    lines, start = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    torch_root = next((up.parent for up in file.parents if up.name == "torch"), file.parent)
    root = PACKAGES if file.is_relative_to(PACKAGES) else torch_root
    return Code(f"{file.relative_to(root).as_posix()}:{start}", textwrap.dedent("".join(lines)).rstrip())


def with_bias(layer: nn.Linear | nn.LayerNorm) -> str:
    """Return ' + b' if the layer has a bias."""
    return "" if layer.bias is None else " + b"


def folded(parts: Sequence[ModelPart]) -> tuple[ModelPart, ...]:
    """Return the parts with equal neighbours, regardless of their names, merged into one that repeats."""
    merged: list[ModelPart] = []
    for part in parts:
        if merged and replace(merged[-1], repeats=1, name="", box="") == replace(part, repeats=1, name="", box=""):
            merged[-1] = replace(merged[-1], repeats=merged[-1].repeats + part.repeats)
        else:
            merged.append(part)
    return tuple(merged)
