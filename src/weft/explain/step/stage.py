"""Stages of a step in the order of computation, each with the values that it computes, ready to be sent as JSON."""

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.explain.anatomy.parts import PACKAGES

MAX_ENTRIES = 64  # entries of a vector that are sent
MAX_VALUES = 4_096  # values of a tensor that are sent; of many vectors, fewer entries each
MAX_LINES = 40  # lines of a stage's source that are sent
DIGITS = 6  # significant digits of every value
# by name: title, formula and description of a stage
TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("stages.toml").read_text(encoding="utf-8"))

NamedAxis = tuple[str, Sequence[str] | None]  # name of an axis, and labels along it, if any


@dataclass(frozen=True)
class StepStage:
    """One computation of a step. `inputs` are the ids of the stages whose results it reads."""

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
    def result(self) -> dict[str, Any]:
        """Tensor that the stage computes: the first, and for the summary of a block the residual stream after it."""
        return next((tensor for tensor in self.tensors if tensor["name"] == "residual"), self.tensors[0])

    @property
    def norm(self) -> float | None:
        """Norm of the result, uncut; None for integers such as ids."""
        return self.result["norm"]


class StageList(list[StepStage]):
    """Stages recorded so far. `threads` are the values along the tokens' threads, if the family has any."""

    threads: dict[str, Any] | None = None

    @property
    def last(self) -> str:
        return self[-1].id

    def record(
        self,
        id: str,
        *tensors: dict[str, Any],
        text: str | None = None,
        numbers: Mapping[str, float | int | str] | None = None,
        words: Mapping[str, object] | None = None,
        inputs: Iterable[str] | None = None,
        by: Callable[..., Any] | None = None,
        cost: dict[str, int] | None = None,
    ) -> str:
        """Append a stage and return its id, which begins with its group.

        `text` is its entry in stages.toml, by default the last part of the id; `numbers`, which are shown, and `words`
        fill it. `inputs` are the stages that it reads, by default the previous one; `by` is the code that computes it.
        """
        numbers = {key: rounded(n) if isinstance(n, float) else n for key, n in (numbers or {}).items()}
        match, (group, _, name) = re.match(r"\w+\.\d+|step \d+", id), id.rpartition(".")
        title, formula, about = (template.format(**numbers, **(words or {})) for template in TEXTS[text or name])
        stage: dict[str, Any] = {"title": title, "about": about, "formula": formula, "numbers": numbers, "cost": cost}
        stage |= {"inputs": (self.last,) if inputs is None else tuple(inputs), "tensors": tensors}
        stage |= {"source": None if by is None else _source_lines(by)}
        self.append(StepStage(id, match[0] if match else group, **stage))
        return id

    def record_tokens(self, group: str, ids: Sequence[int], pieces: Sequence[str], *, position: int | None) -> None:
        """Append the stage of the token ids that are read, with the position that is followed."""
        followed = {} if position is None else {"place": position, "id": ids[position]}
        tokens = sent("ids", torch.tensor(ids), ("token", pieces), scale="positive")
        text = "tokens" if position is None else "tokens-followed"
        self.record(f"{group}.tokens", tokens, text=text, numbers={"tokens": len(ids)} | followed, inputs=())


def sent(name: str, values: Tensor, *axes: str | NamedAxis, scale: str = "signed") -> dict[str, Any]:
    """Return a tensor as JSON data. A long last axis without labels is cut."""
    array = values.detach().cpu().numpy() if values.dtype != torch.bfloat16 else values.float().cpu().numpy()
    named: list[NamedAxis] = [(axis, None) if isinstance(axis, str) else axis for axis in axes]
    assert array.ndim == len(named), f"{name}: {array.shape} along {named}"
    shape, cut, integers = list(array.shape), None, array.dtype.kind in "biu"
    norm = None if integers else rounded(np.linalg.norm(array[np.isfinite(array)]))
    limit = min(MAX_ENTRIES, max(1, MAX_VALUES // max(1, math.prod(shape[:-1]))))
    if named[-1][1] is None and shape[-1] > limit:
        array, cut = array[..., :limit], {"axis": len(shape) - 1, "of": shape[-1]}
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
    """Return values rounded to significant digits, as lists; non-finite values are None, integers unchanged."""
    if isinstance(values, Tensor):
        values = (values.detach().float() if values.is_floating_point() else values).cpu()
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return array.astype(int).tolist()
    array = array.astype(float)
    finite = np.isfinite(array)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where((array == 0) | ~finite, 0.0, np.floor(np.log10(np.abs(array))))
    digits = np.clip(DIGITS - 1 - exponent, -300, 300)
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    result = np.round(array * up / down) / up * down
    if finite.all():
        return result.tolist()
    mixed = result.astype(object)
    mixed[~finite] = None
    return mixed.tolist()


@cache
def _source_lines(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the first source lines of a function or class of weft."""
    lines, first = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    return {
        "file": f"src/{file.relative_to(PACKAGES).as_posix()}",
        "symbol": function.__qualname__,
        "first": first,
        "lines": [line.rstrip("\n") for line in lines[:MAX_LINES]],
    }


def cost(flops: int, *weights: nn.Module | Tensor | None) -> dict[str, int]:
    """Return operations per token (2 per multiply-add), and the parameters and bytes of the weights involved."""
    present = [each for each in weights if each is not None]
    tensors = [t for each in present for t in ([each] if isinstance(each, Tensor) else each.parameters())]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"flops": flops, "parameters": sum(tensor.numel() for tensor in tensors), "bytes": size}


def linear_cost(linear: nn.Linear) -> dict[str, int]:
    """Return the cost of a linear layer per token."""
    return cost(2 * linear.weight.numel(), linear)
