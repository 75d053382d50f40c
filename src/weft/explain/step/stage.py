"""What one step of a model is told in: stages in the order of computation, each with the numbers that it computes."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.explain.anatomy.parts import PACKAGES

MAX_ENTRIES = 64  # of a vector that are sent
MAX_NUMBERS = 12_288  # of a tensor that are sent: of many vectors fewer entries each
MAX_LINES = 40  # of a stage's source that are sent
DIGITS = 6  # significant ones, of every number

Axis = tuple[str, Sequence[str] | None]  # its name, and what its places are called where these have names


@dataclass(frozen=True)
class Stage:
    """One thing that is computed. `inputs` are the ids of stages whose results it reads."""

    id: str
    group: str
    title: str
    about: str
    formula: str
    numbers: Mapping[str, float | int | str]
    inputs: tuple[str, ...]
    tensors: tuple[dict[str, Any], ...]
    source: dict[str, Any] | None
    cost: dict[str, int] | None


@dataclass
class Way:
    """The stages of a step, as they are found. Those without `inputs` of their own read what the last one gave."""

    stages: list[Stage] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.stages[-1].id

    def add(
        self,
        id: str,
        title: str,
        about: str,
        formula: str,
        *tensors: dict[str, Any],
        group: str = "",
        numbers: Mapping[str, Any] | None = None,
        inputs: Iterable[str] | None = None,
        by: Callable[..., Any] | None = None,
        cost: dict[str, int] | None = None,
    ) -> str:
        """A further stage; `by` is the function or class of weft's that computes it. Returns its id."""
        read = tuple(inputs) if inputs is not None else ((self.last,) if self.stages else ())
        told = {name: rounded(value) if isinstance(value, float) else value for name, value in (numbers or {}).items()}
        source = None if by is None else source_of(by)
        self.stages.append(
            Stage(id, group or id.rpartition(".")[0], title, about, formula, told, read, tensors, source, cost)
        )
        return id


def shown(name: str, values: Tensor | NDArray[Any], *axes: str | Axis, scale: str = "signed") -> dict[str, Any]:
    """A tensor as it is sent. A last axis whose places have no names is cut where it is long."""
    array = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=float)
    named: list[Axis] = [(axis, None) if isinstance(axis, str) else axis for axis in axes]
    assert array.ndim == len(named), f"{name}: {array.shape} along {named}"
    shape, cut = list(array.shape), None
    most = min(MAX_ENTRIES, max(1, MAX_NUMBERS // max(1, math.prod(shape[:-1]))))
    if named[-1][1] is None and shape[-1] > most:
        array, cut = array[..., :most], {"axis": len(shape) - 1, "of": shape[-1]}
    return {
        "name": name,
        "shape": shape,
        "axes": [{"name": axis, "labels": None if labels is None else list(labels)} for axis, labels in named],
        "values": rounded(array),
        "scale": scale,
        "cut": cut,
    }


def rounded(values: Any) -> Any:
    """Numbers to their significant digits, as lists; what is not finite is None."""
    array = np.asarray(values, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where((array == 0) | ~np.isfinite(array), 0.0, np.floor(np.log10(np.abs(array))))
    digits = np.clip(DIGITS - 1 - exponent, -300, 300)
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    found = np.round(array * up / down) / up * down
    if np.isfinite(found).all():
        return found.tolist()
    return np.where(np.isfinite(found), found.astype(object), None).tolist()  # type: ignore[call-overload]


@cache
def source_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The lines of weft that compute something, from the first on."""
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    return {
        "file": f"src/{file.relative_to(PACKAGES).as_posix()}",
        "symbol": function.__qualname__,
        "first": first,
        "lines": [line.rstrip("\n") for line in lines[:MAX_LINES]],
    }


def cost(flops: int, *weights: nn.Module | Tensor | None) -> dict[str, int]:
    """Operations of one token (2 a product), and the parameters and bytes of the weights that take part."""
    there = [each for each in weights if each is not None]
    tensors = [t for each in there for t in ([each] if isinstance(each, Tensor) else each.parameters())]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"flops": flops, "parameters": sum(tensor.numel() for tensor in tensors), "bytes": stored}


def products(*linears: nn.Module) -> int:
    """Operations of one token in linear layers: a multiplication and an addition for every weight."""
    return sum(2 * linear.weight.numel() for linear in linears)  # type: ignore[operator,union-attr]
