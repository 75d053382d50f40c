"""The parts of a model in the order of computation, each with its formula, shapes, parameters and source lines.

A model is described from its settings and from itself, built without memory: the parameters are those of its modules,
so they sum to the model's own.
"""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

from torch import nn

from weft.config import Config

PACKAGES = Path(__file__).parents[3]


@dataclass(frozen=True)
class Code:
    """Source lines, and where they stand."""

    place: str
    text: str


@dataclass(frozen=True)
class Part:
    """A part of a model, from what comes in to what goes out.

    `own` are parameters that none of its `parts` has. In a diagram a part is a `box` with a second line `detail`, or,
    without a box, the frame around its parts; a sum skips over the `skips` parts before it; `loops` is for what reads
    its own last output, and `reads` for what reads the source.
    """

    name: str
    formula: str = ""
    shape: str = ""
    own: int = 0
    settings: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()
    parts: tuple["Part", ...] = ()
    repeats: int = 1
    note: str = ""
    box: str = ""
    detail: str = ""
    skips: int = 0
    loops: bool = False
    reads: bool = False

    @property
    def parameters(self) -> int:
        return self.own + sum(part.repeats * part.parameters for part in self.parts)


def part(
    settings: Config, name: str, formula: str, shape: str, keys: str = "", *by: Callable[..., Any], **more: Any
) -> Part:
    """A part whose source lines are those of the functions and classes `by`; what is `more` are fields of it.

    `keys` are the settings that chose it, between spaces; those that are not set are left out. In a diagram one with a
    `detail` is a box with the part's name, unless another `box` is given.
    """
    set_as = tuple(line for key in keys.split() if (line := _setting(settings, key)))
    more.setdefault("box", name.capitalize() if more.get("detail") else "")
    return Part(name, formula, shape, settings=set_as, code=tuple(map(code, by)), **more)


def _setting(settings: Any, key: str) -> str:
    """As a recipe has it: `model.norm.kind = "layer"`; nothing where it is not set."""
    value = reduce(lambda value, step: getattr(value, step, None), key.split("."), settings)
    if isinstance(value, bool):
        return f"model.{key} = {str(value).lower()}"
    shown = f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    return "" if value is None else f"model.{key} = {shown}"


def size(*of: nn.Module | nn.Parameter | None) -> int:
    """How many parameters modules have, and parameters are."""
    each = ((one,) if isinstance(one, nn.Parameter) else one.parameters() for one in of if one is not None)
    return sum(parameter.numel() for parameters in each for parameter in parameters)


@cache
def code(function: Callable[..., Any]) -> Code:
    """The source lines of a function or class; what stands elsewhere than here is PyTorch's."""
    lines, start = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    torch_home = next((up.parent for up in file.parents if up.name == "torch"), file.parent)
    home = PACKAGES if file.is_relative_to(PACKAGES) else torch_home
    return Code(f"{file.relative_to(home).as_posix()}:{start}", textwrap.dedent("".join(lines)).rstrip())


def with_bias(linear: nn.Linear) -> str:
    """' + b', if it has one."""
    return "" if linear.bias is None else " + b"


def folded(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same with equal neighbours as one that repeats; names end in a number, which is no difference."""
    found: list[Part] = []
    for part in parts:
        if found and replace(found[-1], repeats=1, name="", box="") == replace(part, repeats=1, name="", box=""):
            found[-1] = replace(found[-1], repeats=found[-1].repeats + part.repeats)
        else:
            found.append(part)
    return tuple(found)
