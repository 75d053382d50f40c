"""Cases of an exercise: arguments drawn by seed, the expected results, and how exactly they must be met.

A case's tolerance follows from its condition: how much the reference's result changes if its arguments are rounded.
"""

import hashlib
import inspect
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.course.calls import CallRequest, CallResult, call
from weft.course.exercises import Exercise
from weft.course.values import FLOORS, Draw, MismatchError, gap, magnitude, map_tensors, parts
from weft.errors import ConfigError

ROUNDS = 2  # seeds for which the cases of an exercise are drawn
PERTURBATIONS = 4  # of a case, to measure its condition
AMPLIFICATION = 64  # rounding of a whole computation, in units of rounding of its arguments


class Case(NamedTuple):
    """Arguments with the expected results by name, and the tolerance of each."""

    name: str
    arguments: dict[str, Any]
    expected: dict[str, Any]
    tolerances: dict[str, float]

    @property
    def size(self) -> int:
        return sum(value.numel() for value in self.arguments.values() if isinstance(value, Tensor))


@lru_cache(maxsize=64)
def draw_cases(chosen: Exercise, secret: str) -> tuple[Case, ...]:
    """Draw the cases of an exercise; those of a secret are known to whoever knows it."""
    cases = tuple(_drawn(chosen, chosen.reference(), secret))
    if not cases:
        raise ConfigError(f"{chosen.folder / 'reference.py'}: every case depends on rounding, so none can be checked")
    return cases


def _drawn(chosen: Exercise, reference: Any, secret: str) -> Iterator[Case]:
    for number in range(ROUNDS):
        digest = hashlib.sha256(f"{secret}/{chosen.name}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:8]) if secret else number
        for position, (name, arguments) in enumerate(reference.cases(Draw(seed))):
            yield from conditioned(chosen, arguments, name=name)
            if position == 0 and any(is_float(value) for value in arguments.values()):
                single = map_tensors(arguments, lambda each: each.float() if each.is_floating_point() else each)
                yield from conditioned(chosen, single, name=f"{name} in float32", dtype=torch.float32)


def conditioned(
    chosen: Exercise, arguments: dict[str, Any], *, name: str = "", dtype: torch.dtype = torch.float64
) -> Iterator[Case]:
    """Yield a case, unless rounding of its arguments changes its result altogether."""
    reference = chosen.reference()
    names = inspect.signature(getattr(reference, chosen.name)).parameters
    arguments = {name: arguments[name] for name in names}
    exact = map_tensors(arguments, lambda each: each.double() if each.is_floating_point() else each)
    expected = _expected(chosen, reference, exact)
    largest = max(map(magnitude, expected.values()), default=0.0)
    tolerances = {
        part: FLOORS[dtype] * max(magnitude(value), 1e-3 * largest, 1e-300) for part, value in expected.items()
    }
    generator = torch.Generator().manual_seed(0)
    for _ in range(PERTURBATIONS):
        nudged = map_tensors(exact, lambda each: _nudged(each, torch.finfo(dtype).eps, generator))
        try:
            changed = _expected(chosen, reference, nudged)
            for part, value in expected.items():
                tolerances[part] = max(tolerances[part], AMPLIFICATION * gap(value, changed[part]))
        except MismatchError:
            return
    if all(math.isfinite(tolerance) for tolerance in tolerances.values()):
        yield Case(name, arguments, expected, tolerances)


def _expected(chosen: Exercise, reference: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    request = CallRequest(arguments, differentiable(chosen, arguments))
    result = call(getattr(reference, chosen.name), request, "")
    if result.error:
        raise ConfigError(f"{chosen.folder / 'reference.py'}: {result.error}")
    return named_parts(chosen, result)


def _nudged(value: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    return value * (1 + eps * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1))


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def differentiable(chosen: Exercise, arguments: dict[str, Any]) -> list[str]:
    """Return the arguments of a case whose gradients are compared."""
    return [name for name in chosen.gradients if is_float(arguments[name])]


def named_parts(chosen: Exercise, result: CallResult) -> dict[str, Any]:
    """Name the outputs and the gradients of a result."""
    return parts(result.value, chosen.outputs) | {f"∂/∂{name}": each for name, each in result.gradients.items()}
