"""Cases of an exercise, with the results that its reference gives, and verdicts on a student's results.

The tolerance of a case follows from its condition: how much the reference's result changes when its arguments are
rounded.
"""

import hashlib
import inspect
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.course.calls import CallResult, Case, call
from weft.course.exercises import Exercise
from weft.course.values import FLOORS, Draw, MismatchError, OtherValue, gap, is_float, magnitude, map_tensors
from weft.errors import ConfigError

ROUNDS = 2  # seeds for which the cases of an exercise are drawn
PERTURBATIONS = 4  # of a case, to measure its condition
AMPLIFICATION = 64  # rounding of a whole computation, in units of rounding of its arguments
ROUNDED = ": only float32's digits are right; keep the inputs' dtype"


class Judgement(NamedTuple):
    """Verdict on one case: a problem and the output it is about, or neither; `parts` are the outputs by name."""

    case: Case
    result: CallResult
    problem: str = ""
    about: str = ""
    parts: dict[str, Any] = {}  # noqa: RUF012


@lru_cache(maxsize=64)
def draw_cases(chosen: Exercise, secret: str) -> tuple[Case, ...]:
    """Draw the cases of an exercise; those of a secret are known to whoever knows it."""
    cases = tuple(_drawn(chosen, secret))
    if not cases:
        raise ConfigError(f"{chosen.folder / 'reference.py'}: every case depends on rounding, so none can be checked")
    return cases


def _drawn(chosen: Exercise, secret: str) -> Iterator[Case]:
    for number in range(ROUNDS):
        digest = hashlib.sha256(f"{secret}/{chosen.name}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:8]) if secret else number
        for position, (name, arguments) in enumerate(chosen.reference().cases(Draw(seed))):
            yield from conditioned(chosen, Case(arguments, name=name, repeat=number == position == 0))
            if position == 0 and any(map(is_float, arguments.values())):
                single = map_tensors(arguments, lambda each: each.float() if each.is_floating_point() else each)
                yield from conditioned(chosen, Case(single, name=f"{name} in float32"), torch.float32)


def conditioned(chosen: Exercise, case: Case, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
    """Yield a case with what is expected, unless rounding of its arguments changes its result altogether."""
    arguments = {name: case.arguments[name] for name in inspect.signature(chosen.function()).parameters}
    case = case._replace(arguments=arguments, gradients=[n for n in chosen.gradients if is_float(arguments[n])])
    exact = map_tensors(arguments, lambda each: each.double() if each.is_floating_point() else each)
    expected = _expected(chosen, case, exact)
    largest = max(map(magnitude, expected.values()), default=0.0)
    tolerances = {
        part: FLOORS[dtype] * max(magnitude(value), 1e-3 * largest, 1e-300) for part, value in expected.items()
    }
    generator = torch.Generator().manual_seed(0)

    def nudged(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        noise = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1
        return value * (1 + torch.finfo(dtype).eps * noise)

    for _ in range(PERTURBATIONS):
        changed = _expected(chosen, case, map_tensors(exact, nudged))
        try:
            for part, value in expected.items():
                tolerances[part] = max(tolerances[part], AMPLIFICATION * gap(value, changed[part]))
        except MismatchError:
            return
    if all(map(math.isfinite, tolerances.values())):
        yield case._replace(expected=expected, tolerances=tolerances)


def _expected(chosen: Exercise, case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
    result = call(chosen.function(), case._replace(arguments=arguments, repeat=False), "")
    if result.error:
        raise ConfigError(f"{chosen.folder / 'reference.py'}: {result.error}")
    return result.named(chosen.outputs)


def judge(chosen: Exercise, case: Case, result: CallResult) -> Judgement:
    """Compare a result with a case."""
    problem, given = "", dict[str, Any]()
    if result.error:
        where = f"line {result.line}: " if result.line else ""
        dtype = "; torch.zeros and torch.ones make float32 unless given a dtype" if "dtype" in result.error else ""
        problem = f"{where}{result.error}{dtype}"
    elif empty := _empty(chosen, result.value):
        problem = empty
    elif result.changed:
        problem = f"it changes its argument {result.changed[0]} in place"
    elif result.random:
        problem = "it returns another result when it is called again: it uses global randomness"
    else:
        try:
            given = result.named(chosen.outputs)
        except MismatchError as error:
            problem = str(error)
    for name in case.expected:  # a gradient is missing if NumPy computes the function
        if name in given and not case.holds(name, given[name]):
            problem = difference(case, name, expected=case.expected[name], given=given[name])
            return Judgement(case, result, problem, name, given)
    return Judgement(case, result, problem, parts=given)


def _empty(chosen: Exercise, value: Any) -> str:
    """Say what to do first, if the hole is empty."""
    values = value if isinstance(value, tuple) else (value,)
    empty = [isinstance(each, OtherValue) and each == "..." for each in values]
    name = next(iter(chosen.formulas)) if all(empty) else chosen.outputs[empty.index(max(empty)) % len(chosen.outputs)]
    return f"it returns ...: fill the hole, beginning with {name} = {chosen.formulas[name]}" if any(empty) else ""


def difference(case: Case, name: str, *, expected: Any, given: Any) -> str:
    """Say how a value differs from what is expected."""
    where = f" in the case “{case.name}”"
    try:
        distance = gap(expected, given)
    except MismatchError as error:
        return f"{name}: {error}{where}"
    nan = isinstance(given, Tensor | float) and bool(torch.as_tensor(given).isnan().any())
    finite = math.isfinite(distance)
    how = f"differs by {distance:.2g}" if finite else "contains NaN" if nan else "differs"
    problem = f"{name} {how}{where}"
    if name.startswith("∂"):
        detached = "is something detached, or computed with .data or .item()?"
        return f"{problem}, though the output is right: {detached if finite else 'does something overflow on the way?'}"
    double = any(is_float(value) and value.dtype == torch.float64 for value in case.arguments.values())
    rounded = double and distance < FLOORS[torch.float32] * magnitude(expected)
    return f"{problem}{ROUNDED if rounded else ''}"
