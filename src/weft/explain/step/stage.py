"""What one step of a model is told in: stages in the order of computation, each with the numbers that it computes."""

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from weft.explain.anatomy.parts import PACKAGES

MAX_ENTRIES = 64  # of a vector that are sent
MAX_NUMBERS = 12_288  # of a tensor that are sent: of many vectors fewer entries each
MAX_LINES = 40  # of a stage's source that are sent
DIGITS = 6  # significant ones, of every number
# by name: what a stage is called, its formula, and what it does
TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("stages.toml").read_text(encoding="utf-8"))

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

    @property
    def norm(self) -> float | None:
        """Of the whole of its main tensor; whole numbers, such as ids, have none."""
        return self.tensors[0]["norm"]


class Told(TypedDict, total=False):
    """What else is told of a stage: this model's sizes; other words that its texts need; the ids of the stages whose
    results it reads, if not the one before it; the function or class that computes it; what it costs."""

    numbers: Mapping[str, float | int | str]
    words: Mapping[str, object]
    inputs: Iterable[str]
    by: Callable[..., Any]
    cost: dict[str, int]


@dataclass
class Way:
    """The stages of a step, as they are found."""

    stages: list[Stage] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.stages[-1].id

    def add(self, id: str, name: str, *tensors: dict[str, Any], **told: Unpack[Told]) -> str:
        """A further stage, by its `name` in stages.toml; its id begins with its group's name. Returns the id."""
        numbers = {name: rounded(n) if isinstance(n, float) else n for name, n in told.get("numbers", {}).items()}
        inputs = tuple(told["inputs"]) if "inputs" in told else (self.last,)
        source = source_of(told["by"]) if "by" in told else None
        found = re.match(r"\w+\.\d+|step \d+", id)
        group = found[0] if found else id.rpartition(".")[0]
        title, formula, about = (text.format(**numbers, **told.get("words", {})) for text in TEXTS[name])
        self.stages.append(Stage(id, group, title, about, formula, numbers, inputs, tensors, source, told.get("cost")))
        return id


def shown(name: str, values: Tensor, *axes: str | Axis, scale: str = "signed") -> dict[str, Any]:
    """A tensor as it is sent. A last axis whose places have no names is cut where it is long."""
    array = values.detach().cpu().numpy() if values.dtype != torch.bfloat16 else values.float().cpu().numpy()
    named: list[Axis] = [(axis, None) if isinstance(axis, str) else axis for axis in axes]
    assert array.ndim == len(named), f"{name}: {array.shape} along {named}"
    shape, cut, whole = list(array.shape), None, array.dtype.kind in "biu"
    norm = None if whole else rounded(np.linalg.norm(array[np.isfinite(array)]))
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
        "norm": norm,
    }


def rounded(values: Any) -> Any:
    """Numbers to their significant digits, as lists; what is not finite is None. Whole numbers stay as they are."""
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return array.astype(int).tolist()
    array = array.astype(float)
    finite = np.isfinite(array)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where((array == 0) | ~finite, 0.0, np.floor(np.log10(np.abs(array))))
    digits = np.clip(DIGITS - 1 - exponent, -300, 300)
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    found = np.round(array * up / down) / up * down
    if finite.all():
        return found.tolist()
    mixed = found.astype(object)
    mixed[~finite] = None
    return mixed.tolist()


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


def products(linear: nn.Linear) -> int:
    """Operations of one token in a linear layer: a multiplication and an addition for every weight."""
    return 2 * linear.weight.numel()


def token_stage(way: Way, group: str, ids: Sequence[int], pieces: Sequence[str], place: int | None) -> None:
    """What is read, as ids, and the place of the one that is followed."""
    way.add(
        f"{group}.tokens",
        "tokens" if place is None else "tokens-followed",
        shown("ids", torch.tensor(ids), ("token", pieces), scale="positive"),
        numbers={"tokens": len(ids)} | ({} if place is None else {"place": place, "id": ids[place]}),
        inputs=(),
    )
