"""The parts of a model in the order of computation, each with its formula, shapes, parameters and source lines.

A model is described from its settings and from itself, built without memory: the parameters are those of its modules,
so they sum to the model's own.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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
    reads: bool = field(default=False)

    @property
    def parameters(self) -> int:
        """Of one of its repeats."""
        return self.own + sum(part.repeats * part.parameters for part in self.parts)


def size(module: nn.Module | Iterable[nn.Parameter] | None) -> int:
    """How many parameters a module has."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module or ()
    return sum(parameter.numel() for parameter in parameters)


@cache
def code(function: Callable[..., Any]) -> Code:
    """The source lines of a function or class."""
    lines, start = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    inside = file.is_relative_to(PACKAGES)
    # what stands elsewhere is PyTorch's
    place = file.relative_to(PACKAGES) if inside else Path(*file.parts[len(file.parts) - 1 - _torch(file) :])
    return Code(f"{place.as_posix()}:{start}", textwrap.dedent("".join(lines)).rstrip())


def _torch(file: Path) -> int:
    return file.parts[::-1].index("torch") if "torch" in file.parts else 0


def keys(settings: Config, *names: str) -> tuple[str, ...]:
    """Settings as a recipe has them: `model.norm.kind = "layer"`. Those that are not set are left out."""
    found = []
    for name in names:
        value: Any = settings
        for step in name.split("."):
            value = getattr(value, step, None)
        if value is not None:
            found.append(f"model.{name} = {_toml(value)}")
    return tuple(found)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def dims(*sizes: int | str) -> str:
    """'(B, T, 768)'."""
    return f"({', '.join(map(str, sizes))})"


def with_bias(bias: bool, letter: str = "b") -> str:
    """' + b', if there is one."""
    return f" + {letter}" if bias else ""


def folded(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same with equal neighbours as one that repeats; names end in a number, which is no difference."""
    found: list[Part] = []
    for part in parts:
        if found and replace(found[-1], repeats=1, name="", box="") == replace(part, repeats=1, name="", box=""):
            found[-1] = replace(found[-1], repeats=found[-1].repeats + part.repeats)
        else:
            found.append(part)
    return tuple(found)
