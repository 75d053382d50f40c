"""Checks a student's function against a reference, and explains the first tensor that differs.

The result alone decides. Variables that are named as in the exercise only help to find where it went wrong.
"""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.api.arguments import checked
from weft.course.attempt import from_json
from weft.course.calls import CallRequest, CallResult, TracedValue, call
from weft.course.cases import AMPLIFICATION, Case, conditioned, differentiable, draw_cases, is_float, named_parts
from weft.course.exercises import Exercise, Mistake, exercise, record_progress
from weft.course.explanation import Explanation
from weft.course.values import FLOORS, Draw, MismatchError, OtherValue, encode, gap, magnitude
from weft.errors import ConfigError
from weft.workers import Children

SIZES = (40, 160)  # for which the executed lines are counted; a quadratic loop executes 16 times as many
MAX_GROWTH = 8.0
WALL_FACTOR = 3  # seconds of wall-clock time per second of CPU time; the machine may be busy
Calls = Callable[[Sequence[CallRequest]], list[CallResult]]


class Judgement(NamedTuple):
    """Verdict on one case: a problem and the output it is about, or neither; `parts` are the outputs by name."""

    case: Case
    result: CallResult
    problem: str = ""
    about: str = ""
    parts: dict[str, Any] = {}  # noqa: RUF012


class AttemptLimits(NamedTuple):
    """Limits of the process that runs a file: seconds of CPU time, and bytes of memory beyond torch's."""

    seconds: int = 10
    bytes: int = 2 << 30


DEFAULT_LIMITS = AttemptLimits()


@checked
def check(function: Any, name: str) -> Explanation:
    """Check a function that solves the exercise `name`; the answer explains what is wrong, in text and in HTML.

    The function runs in this process.
    """
    if not callable(function):
        raise ConfigError(f"weft.check: expected a function and an exercise's name, got {type(function).__name__}")
    chosen = exercise(name)
    code = getattr(inspect.unwrap(function), "__code__", None)  # a module or another object has none
    file = code.co_filename if code else ""
    found = examine(chosen, lambda requests: [call(function, request, file) for request in requests])
    record_progress(chosen.name, found.passed, found.cases)
    return found


class FileCalls:
    """Calls of a function in a submitted file, each series in a limited process; `weak` are limits not enforced."""

    def __init__(self, chosen: Exercise, source: str, *, children: Children, limits: AttemptLimits) -> None:
        self.chosen, self.source, self.children, self.limits = chosen, source, children, limits
        self.weak: list[str] = []

    def __call__(self, requests: Sequence[CallRequest]) -> list[CallResult]:
        calls = [each._asdict() | {"arguments": encode(each.arguments)} for each in requests]
        name, hidden = self.chosen.name, str(self.chosen.folder.parent.resolve())
        limits = {**self.limits._asdict(), "wall": WALL_FACTOR * self.limits.seconds, "hidden": hidden}
        request = {"source": self.source, "file": f"{name}.py", "function": name, "calls": calls, **limits}
        with self.children.acquire() as child:
            try:
                answer = child.request(request)
            except OSError:  # it ended the process that started it
                child.process.kill()
                raise _EndedError("it ended the process that runs it") from None
        results, loading = list[CallResult](), ""
        for line in answer["lines"]:
            try:
                data = json.loads(line)
                if "weak" in data:
                    self.weak = [str(each) for each in data["weak"]]
                elif "load" in data:
                    failed = from_json(data["load"])
                    loading = f"line {failed.line}: {failed.error}" if failed.line else failed.error
                else:
                    results.append(from_json(data))
            except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # RecursionError is a RuntimeError
                results.append(CallResult(error="the answer cannot be read"))
        if loading:
            raise _EndedError(loading)
        results = results[: len(requests)]
        reason = self._reason(answer["ended"], answer["status"])
        return results + [CallResult(error=reason) for _ in range(len(requests) - len(results))]

    def _reason(self, ended: str, status: int) -> str:
        if ended == "time" or status in (-24, -9):  # SIGXCPU, and SIGKILL a second later
            return f"it takes more than {self.limits.seconds} seconds"
        if ended == "size":
            return "its answers are too large"
        return f"the process ended with exit status {status} before it answered"


class _EndedError(Exception):
    """No function could be called."""


def check_file(
    chosen: Exercise, source: str, children: Children, *, secret: str = "", limits: AttemptLimits = DEFAULT_LIMITS
) -> Explanation:
    """Check the code of a submission in a limited process."""
    calls = FileCalls(chosen, source, children=children, limits=limits)
    try:
        found = examine(chosen, calls, secret=secret)
    except _EndedError as error:
        found = Explanation(chosen.name, chosen.title, 0, 1, problem=str(error))
    return found._replace(weak=tuple(calls.weak))


def examine(chosen: Exercise, calls: Calls, *, secret: str = "") -> Explanation:
    """Check a function that `calls` calls; a secret draws other cases than those that students see."""
    cases = draw_cases(chosen, secret)
    requests = [
        CallRequest(case.arguments, differentiable(chosen, case.arguments), repeat=number == 0)
        for number, case in enumerate(cases)
    ]
    judged = [judge(chosen, case, result) for case, result in zip(cases, calls(requests), strict=True)]
    passed = sum(not each.problem for each in judged)
    found = Explanation(chosen.name, chosen.title, passed, len(judged), printed=judged[0].result.printed)
    if passed == len(judged):
        return found._replace(problem=_growth(chosen, calls))
    return _explain(chosen, judged, calls)._replace(passed=passed, cases=len(judged), printed=found.printed)


# ---- Verdicts


def judge(chosen: Exercise, case: Case, result: CallResult) -> Judgement:
    """Compare a result with a case."""
    if result.error:
        where = f"line {result.line}: " if result.line else ""
        return Judgement(case, result, f"{where}{result.error}")
    if None not in case.expected.values() and (empty := _empty(chosen, result.value)):
        return Judgement(case, result, empty)
    if result.changed:
        return Judgement(case, result, f"it changes its argument {result.changed[0]} in place")
    if result.random:
        return Judgement(case, result, "it returns another result when it is called again: it uses global randomness")
    try:
        given = named_parts(chosen, result)
    except MismatchError as error:
        return Judgement(case, result, str(error))
    for name, expected in case.expected.items():
        if name not in given:
            continue  # a gradient, of a function that NumPy computes
        try:
            distance = gap(expected, given[name])
        except MismatchError as error:
            return Judgement(case, result, f"{name}: {error}", name, given)
        if distance > case.tolerances[name]:
            return Judgement(case, result, _by_how_much(case, name, distance), name, given)
    return Judgement(case, result, parts=given)


def _empty(chosen: Exercise, value: Any) -> str:
    """Say what to do first, if the hole is empty."""
    values = value if isinstance(value, tuple) else (value,)
    empty = [each is None or each is ... or (isinstance(each, OtherValue) and each == "...") for each in values]
    if not any(empty):
        return ""
    name = next(iter(chosen.formulas)) if all(empty) else chosen.outputs[empty.index(True) % len(chosen.outputs)]
    shown = "None" if value is None else "..."
    return f"it returns {shown}: fill the hole, beginning with {name} = {chosen.formulas[name]}"


def _by_how_much(case: Case, name: str, distance: float) -> str:
    about = f"{name} differs by {distance:.2g}" if math.isfinite(distance) else f"{name} differs"
    single = FLOORS[torch.float32] * magnitude(case.expected[name])
    double = any(is_float(value) and value.dtype == torch.float64 for value in case.arguments.values())
    if name.startswith("∂"):
        return f"{about}, though the output is right: is something detached, or computed with .data or .item()?"
    return (
        f"{about}: only float32's digits are right; keep the inputs' dtype" if double and distance < single else about
    )


def _growth(chosen: Exercise, calls: Calls) -> str:
    """Name a loop that grows with the square of the size, if the reference's `growth` forbids one."""
    reference = chosen.reference()
    if not hasattr(reference, "growth"):
        return ""
    few, many = calls([CallRequest(reference.growth(Draw(0), size), count_lines=True) for size in SIZES])
    if many.error or many.lines > MAX_GROWTH * max(few.lines, 10):
        return "its loops grow with the square of the input's length; one pass is enough"
    return ""


# ---- Explanations


def _explain(chosen: Exercise, judged: Sequence[Judgement], calls: Calls) -> Explanation:
    """Explain the smallest case that is wrong; first what is not about numbers, such as a changed argument."""
    failed = [each for each in judged if each.problem]
    worst = min(failed, key=lambda each: (bool(each.about or each.result.error), each.case.size))
    case, name, line, text, problem = worst.case, worst.about, worst.result.line, worst.result.text, worst.problem
    expected, given = case.expected.get(name), worst.parts.get(name)
    plain = not name and not worst.result.error  # such as an argument changed in place
    if not plain:
        first = _first_step(chosen, worst, calls)
        if first is not None:
            step, expected, problem = first
            name, line, text, given = step.name, step.line, step.text, step.value
            problem += f" in the case “{case.name}”" + (f"; then {worst.problem}" if worst.result.error else "")
        elif not worst.result.error:
            problem += f" in the case “{case.name}”"
    mistake = _known_mistake(chosen, judged)
    if mistake is None and worst.parts and _right_alone(chosen, case, calls):
        problem += "; each row alone is right: the result of a row depends on the other rows of the batch"
    wrong = tuple(dict.fromkeys(each.case.name for each in failed))
    return Explanation(
        chosen.name,
        chosen.title,
        problem=problem,
        tensor=name,
        formula=f"{name} = {chosen.formulas[name]}" if name in chosen.formulas else "",
        source=f"lecture {chosen.lecture}, {chosen.slide}; {chosen.paper}",
        line=line,
        text=text,
        mistake=mistake.says if mistake else "",
        expected=expected,
        given=given,
        arguments=case.arguments,
        failed=wrong,
    )


def _first_step(chosen: Exercise, worst: Judgement, calls: Calls) -> tuple[TracedValue, Any, str] | None:
    """Return the first watched variable with another value than in the reference, that value, and the problem."""
    request = CallRequest(worst.case.arguments, watch=list(chosen.formulas))
    ours = call(getattr(chosen.reference(), chosen.name), request, str(chosen.folder / "reference.py")).steps
    theirs = calls([request])[0].steps
    for position, step in enumerate(ours):
        expected = [each.value for each in ours if each.name == step.name]
        given = [each for each in theirs if each.name == step.name]
        number = sum(each.name == step.name for each in ours[:position])
        if len(given) == len(expected):
            given = given[number : number + 1]
        elif number + 1 < len(expected):
            continue  # other loops: only the last values can be compared
        if step.name != "return" and given and not any(_close(step.value, each.value) for each in given):
            try:
                problem = f"{step.name} differs by {gap(step.value, given[-1].value):.2g}"
            except MismatchError as error:
                if not isinstance(given[-1].value, Tensor):
                    continue  # the name stands for something else
                problem = f"{step.name}: {error}"
            return given[-1], step.value, problem
    last = next((each for each in reversed(theirs) if each.name == "return"), None)
    if last is None or worst.result.error:
        return None
    part = worst.about
    return last._replace(name=part, value=worst.parts.get(part)), worst.case.expected.get(part), worst.problem


def _close(expected: Any, given: Any) -> bool:
    """Return whether a variable has the value that it has in the reference, to the digits of either precision."""
    single = any(is_float(each) and each.dtype == torch.float32 for each in (expected, given))
    try:
        distance = gap(expected, given)
    except MismatchError:
        return False
    return distance <= AMPLIFICATION * FLOORS[torch.float32 if single else torch.float64] * max(
        magnitude(expected), 1e-6
    )


def _known_mistake(chosen: Exercise, judged: Sequence[Judgement]) -> Mistake | None:
    """Return the known mistake that gives exactly these numbers, in all cases."""
    for mistake in chosen.mistakes:
        function = getattr(chosen.reference(mistake), chosen.name)
        if all(_gives(chosen, function, each) for each in judged):
            return mistake
    return None


def _gives(chosen: Exercise, function: Callable[..., Any], judged: Judgement) -> bool:
    """Return whether a function with a mistake gives the result that was judged, or fails where that failed."""
    request = CallRequest(judged.case.arguments, differentiable(chosen, judged.case.arguments))
    result = call(function, request, "")
    if result.error or judged.result.error:
        return bool(result.error) and bool(judged.result.error)
    if result.changed != judged.result.changed:
        return False
    try:
        made, given = named_parts(chosen, result), judged.parts or named_parts(chosen, judged.result)
        return all(
            gap(value, given[name]) <= max(judged.case.tolerances[name], FLOORS[torch.float64] * magnitude(value))
            for name, value in made.items()
            if name in given
        )
    except MismatchError:
        return False


def _right_alone(chosen: Exercise, case: Case, calls: Calls) -> bool:
    """Return whether each row of a batch would have been right alone."""
    batched = [name for name in chosen.batch if isinstance(case.arguments.get(name), Tensor)]
    rows = len(case.arguments[batched[0]]) if batched else 1
    slices = [
        {name: value[row : row + 1] if name in batched else value for name, value in case.arguments.items()}
        for row in range(rows if rows > 1 else 0)
    ]
    alone = [each for arguments in slices for each in conditioned(chosen, arguments)]
    results = calls([CallRequest(each.arguments) for each in alone])
    right = [not judge(chosen, each, result).problem for each, result in zip(alone, results, strict=True)]
    return bool(right) and all(right)
