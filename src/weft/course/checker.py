"""Checks a student's function against a reference, and explains the first tensor that differs.

The result alone decides. Variables that are named as in the exercise only help to find where it went wrong. The
tolerance of a case follows from its condition: how much the reference's result changes if its arguments are rounded.
"""

import hashlib
import inspect
import linecache
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.api.arguments import checked
from weft.course.attempt import NOTHING, REQUESTS, RESULTS, confined
from weft.course.calls import CallRequest, CallResult, TracedValue, call, late, time_limit
from weft.course.confine import Limits
from weft.course.exercises import FOLDER, Exercise, Mistake, exercise, record_progress
from weft.course.explanation import Explanation
from weft.course.repairs import MAX_EDITS
from weft.course.values import FLOORS, Draw, MismatchError, OtherValue, gap, is_float, magnitude, map_tensors, same
from weft.errors import ConfigError
from weft.workers import Children

SECONDS = 10  # of CPU time for a submission
ROUNDS = 2  # seeds for which the cases of an exercise are drawn
PERTURBATIONS = 4  # of a case, to measure its condition
AMPLIFICATION = 64  # rounding of a whole computation, in units of rounding of its arguments
SIZES = (40, 160)  # for which the executed lines are counted; a quadratic loop executes 16 times as many
MAX_GROWTH = 8.0
MAX_VERIFIED, MAX_OTHERS = 24, 2  # edits that are tried on all cases, and other lines that are named
EDIT_LIMITS = Limits(seconds=4, memory=1 << 28)  # of the edits of a cost
ROUNDED = ": only float32's digits are right; keep the inputs' dtype"
Calls = Callable[[Sequence[CallRequest]], list[CallResult]]


class Case(NamedTuple):
    """Arguments with the expected results by name, and the tolerance of each."""

    name: str
    arguments: dict[str, Any]
    expected: dict[str, Any]
    tolerances: dict[str, float]

    @property
    def size(self) -> int:
        return sum(value.numel() for value in self.arguments.values() if isinstance(value, Tensor))

    def holds(self, name: str, given: Any) -> bool:
        """Return whether an output has the expected value."""
        return same(self.expected[name], given, self.tolerances[name])


class Judgement(NamedTuple):
    """Verdict on one case: a problem and the output it is about, or neither; `parts` are the outputs by name."""

    case: Case
    result: CallResult
    problem: str = ""
    about: str = ""
    parts: dict[str, Any] = {}  # noqa: RUF012


@checked
def check(function: Any, name: str) -> Explanation:
    """Check a function that solves the exercise `name`; the answer explains what is wrong, in text and in HTML.

    The function runs in this process, for at most 10 seconds; edits of it, which show the line at fault, run in limited
    copies of this process.
    """
    if not callable(function):
        raise ConfigError(f"weft.check: expected a function and an exercise's name, got {type(function).__name__}")
    chosen = exercise(name)
    found = examine(chosen, calls_here(function))
    record_progress(found)
    return found


def calls_here(function: Callable[..., Any]) -> Calls:
    """Return what calls a function in this process, and edits of it in limited copies of this process."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # a module or another object has none
    file = code.co_filename if code else ""

    def calls(requests: Sequence[CallRequest]) -> list[CallResult]:
        if not requests[0].cost:
            with time_limit(SECONDS, file):
                return [call(function, request, file) for request in requests]
        linecache.getlines(file)  # the copy cannot read every file
        run = partial(map, lambda request: call(function, request, file), requests)
        return _results(confined(lambda _: run(), EDIT_LIMITS) if hasattr(os, "fork") else NOTHING, len(requests), "")

    return calls


def check_file(
    chosen: Exercise, source: str, children: Children, *, secret: str = "", seconds: int = SECONDS
) -> Explanation:
    """Check the code of a submission in limited processes, each with `seconds` of CPU time."""
    hidden = [str(folder.resolve()) for folder in (FOLDER, chosen.folder.parent)]
    request, whole = {"name": chosen.name, "source": source}, Limits(seconds, hidden=hidden)
    weak: set[str] = set()  # limits that the system did not enforce

    def calls(requests: Sequence[CallRequest]) -> list[CallResult]:
        limits = EDIT_LIMITS._replace(hidden=hidden) if requests[0].cost else whole
        try:
            with children.acquire() as child:
                answer = child.request({**request, "limits": limits, "calls": REQUESTS.dump_python(list(requests))})
        except OSError:
            answer = {**NOTHING, "reason": "it ended the process that runs it"}
        weak.update(answer["weak"])
        return _results(answer, len(requests), source)

    return examine(chosen, calls, secret=secret)._replace(weak=tuple(sorted(weak)))


def _results(answer: dict[str, Any], count: int, source: str) -> list[CallResult]:
    """Return as many results as there were calls."""
    found = list(map(_read, answer["lines"][:count]))
    missing = late(answer["reason"], answer["stack"], source) if answer["stack"] else CallResult(error=answer["reason"])
    return found + [missing] * (count - len(found))


def _read(line: str) -> CallResult:
    """Read a result, which a student's code may have made up."""
    try:
        return RESULTS.validate_json(line)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # RecursionError is a RuntimeError
        return CallResult(error="the answer cannot be read")


def examine(chosen: Exercise, calls: Calls, *, secret: str = "") -> Explanation:
    """Check a function that `calls` calls; a secret draws other cases than those that students see."""
    cases = draw_cases(chosen, secret)
    results = calls([request_of(chosen, case.arguments, repeat=number == 0) for number, case in enumerate(cases)])
    judged = [judge(chosen, case, result) for case, result in zip(cases, results, strict=True)]
    passed = sum(not each.problem for each in judged)
    if passed == len(judged):
        found = Explanation(chosen.name, chosen.title, problem=_growth(chosen, calls))
    else:
        found = _explain(chosen, judged, calls)
    return found._replace(passed=passed, cases=len(judged), printed=results[0].printed)


# ---- Cases


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
            yield from conditioned(chosen, arguments, name=name)
            if position == 0 and any(map(is_float, arguments.values())):
                single = map_tensors(arguments, lambda each: each.float() if each.is_floating_point() else each)
                yield from conditioned(chosen, single, name=f"{name} in float32", dtype=torch.float32)


def conditioned(
    chosen: Exercise, arguments: dict[str, Any], *, name: str = "", dtype: torch.dtype = torch.float64
) -> Iterator[Case]:
    """Yield a case, unless rounding of its arguments changes its result altogether."""
    arguments = {name: arguments[name] for name in inspect.signature(chosen.function()).parameters}
    exact = map_tensors(arguments, lambda each: each.double() if each.is_floating_point() else each)
    expected = _expected(chosen, exact)
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
        changed = _expected(chosen, map_tensors(exact, nudged))
        try:
            for part, value in expected.items():
                tolerances[part] = max(tolerances[part], AMPLIFICATION * gap(value, changed[part]))
        except MismatchError:
            return
    if all(map(math.isfinite, tolerances.values())):
        yield Case(name, arguments, expected, tolerances)


def _expected(chosen: Exercise, arguments: dict[str, Any]) -> dict[str, Any]:
    result = call(chosen.function(), request_of(chosen, arguments), "")
    if result.error:
        raise ConfigError(f"{chosen.folder / 'reference.py'}: {result.error}")
    return result.named(chosen.outputs)


def request_of(chosen: Exercise, arguments: dict[str, Any], *, repeat: bool = False) -> CallRequest:
    """Return the call of a case, with the gradients that are compared."""
    return CallRequest(arguments, [name for name in chosen.gradients if is_float(arguments[name])], repeat=repeat)


# ---- Verdicts


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
            problem = _difference(case, name, expected=case.expected[name], given=given[name])
            return Judgement(case, result, problem, name, given)
    return Judgement(case, result, problem, parts=given)


def _empty(chosen: Exercise, value: Any) -> str:
    """Say what to do first, if the hole is empty."""
    values = value if isinstance(value, tuple) else (value,)
    empty = [isinstance(each, OtherValue) and each == "..." for each in values]
    name = next(iter(chosen.formulas)) if all(empty) else chosen.outputs[empty.index(max(empty)) % len(chosen.outputs)]
    return f"it returns ...: fill the hole, beginning with {name} = {chosen.formulas[name]}" if any(empty) else ""


def _difference(case: Case, name: str, *, expected: Any, given: Any) -> str:
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


def _growth(chosen: Exercise, calls: Calls) -> str:
    """Name a loop that grows with the square of the size, if the reference's `growth` forbids one."""
    if (growth := getattr(chosen.reference(), "growth", None)) is None:
        return ""
    few, many = calls([CallRequest(growth(Draw(0), size), count_lines=True) for size in SIZES])
    quadratic = many.error or many.lines > MAX_GROWTH * max(few.lines, 10)
    return "its loops grow with the square of the input's length; one pass is enough" if quadratic else ""


# ---- Explanations


def _explain(chosen: Exercise, judged: Sequence[Judgement], calls: Calls) -> Explanation:
    """Explain the smallest case that is clearly wrong; first what is not about numbers, such as a changed argument."""
    failed = [each for each in judged if each.problem]
    worst = min(failed, key=lambda e: (bool(e.about or e.result.error), ROUNDED in e.problem, e.case.size))
    worst = next((each for each in failed if each.result.late), worst)
    case, result = worst.case, worst.result
    everywhere = len(failed) == len(judged) and len({each.problem for each in judged}) == 1
    step, expected, problem = TracedValue("", result.line, result.text, None), None, worst.problem
    if _other_order(chosen, worst):
        problem = f"its results are right, but in another order: return {', '.join(chosen.outputs)}"
    elif result.late:
        problem += f", in the case “{case.name}”"
    elif worst.about or result.line:
        step, expected = _first_step(chosen, worst, calls)
        if expected is not None and step.name != worst.about:
            problem = _difference(case, step.name, expected=expected, given=step.value)
            problem += f"; then {worst.problem}" if result.error else ""
    numeric = bool(worst.about or result.line or result.changed)
    repairs = _repairs(chosen, judged, calls, worst=worst, line=step.line) if numeric else []
    repair = next((each for each in repairs if each.line == step.line and step.name), next(iter(repairs), None))
    if repair is not None:
        step = step._replace(line=repair.line, text=repair.text)
    elif step.uses and result.error:  # these may be wrong as well
        step, expected, problem = TracedValue("", result.line, result.text, None), None, worst.problem
    elif step.uses:
        step = step._replace(line=0)
    known = chosen.mistakes if not result.late else ()
    mistake = next((m for m in known if all(_gives(chosen, m, each) for each in judged)), None)
    if mistake is None and worst.about and _right_alone(chosen, worst, calls):
        problem += "; each row alone is right: the result of a row depends on the other rows of the batch"
    name = step.name or next(iter(re.findall(r"^(\w+) *=", step.text)), "")
    return Explanation(
        chosen.name,
        chosen.title,
        problem=problem,
        tensor=step.name,
        formula=f"{name} = {chosen.formulas[name]}" if name in chosen.formulas else "",
        source=f"lecture {chosen.lecture}, {chosen.slide}; {chosen.paper}",
        line=step.line,
        text=step.text,
        repair=_said(repair, repairs) if repair else "",
        mistake=mistake.says if mistake else "",
        expected=expected,
        given=step.value,
        arguments={} if everywhere else case.arguments,
        failed=() if everywhere else tuple(dict.fromkeys(each.case.name for each in failed)),
    )


def _other_order(chosen: Exercise, worst: Judgement) -> bool:
    """Return whether the results are right, but returned in another order."""
    return worst.about in chosen.outputs and any(
        all(worst.case.holds(name, worst.parts[other]) for name, other in zip(chosen.outputs, order, strict=True))
        for order in permutations(chosen.outputs)
    )


def _first_step(chosen: Exercise, worst: Judgement, calls: Calls) -> tuple[TracedValue, Any]:
    """Return the first watched variable with another value than in the reference, and that value.

    Without any, it is the wrong output at the line that returns it, or the line that raised an error.
    """
    request = CallRequest(worst.case.arguments, watch=list(chosen.formulas))
    ours = call(chosen.function(), request, str(chosen.folder / "reference.py")).steps
    theirs, result = calls([request])[0].steps, worst.result
    pairs = list(_aligned(ours, theirs, failed=bool(result.error)))
    right = [(step, any(_close(step.value, each.value) for each in given)) for step, given in pairs]
    for position, (step, given) in enumerate(pairs):
        if right[position][1] or type(step.value) is not type(given[-1].value):
            continue
        uses = re.compile(rf"\b{step.name}\b")  # what is computed from it correctly shows that its name means another
        if any(holds and uses.search(later.text) and later.name != step.name for later, holds in right[position:]):
            continue
        final = next(each.value for each in reversed(theirs) if each.name == step.name)
        if step.name in worst.parts and not same(worst.parts[step.name], final):
            continue  # not what is returned
        return _verified(given[-1], right), step.value
    if result.error:
        return TracedValue("", result.line, result.text, None), None
    last = next((each for each in reversed(theirs) if each.name == "return"), TracedValue("", 0, "", None))
    shown = last._replace(name=worst.about, value=worst.parts[worst.about])
    return _verified(shown, right), worst.case.expected[worst.about]


def _verified(step: TracedValue, right: Sequence[tuple[TracedValue, bool]]) -> TracedValue:
    """Leave of what a line uses only those variables that were not found to be right."""
    holds = {each.name for each, fine in right if fine} - {each.name for each, fine in right if not fine}
    return step._replace(uses=tuple(name for name in step.uses if name not in holds))


def _aligned(
    ours: Sequence[TracedValue], theirs: Sequence[TracedValue], *, failed: bool
) -> Iterator[tuple[TracedValue, list[TracedValue]]]:
    """Yield each step of the reference with those of the function that it can be compared with."""
    for position, step in enumerate(ours):
        number, count = (sum(each.name == step.name for each in part) for part in (ours[:position], ours))
        given = [each for each in theirs if each.name == step.name and step.name != "return"]
        if len(given) == count or failed:
            given = given[number : number + 1]
        elif number + 1 < count:
            continue  # other loops: only the last values can be compared
        if given:
            yield step, given


def _close(expected: Any, given: Any) -> bool:
    """Return whether a variable has the value that it has in the reference, perhaps with its axes in another order."""
    if isinstance(expected, Tensor) and isinstance(given, Tensor) and expected.shape != given.shape:
        expected, given = (each.flatten().sort().values for each in (expected, given))
    single, lost = (is_float(each) and each.dtype == torch.float32 for each in (expected, given))
    floor = FLOORS[torch.float32 if single else torch.float64] * (1 if lost and not single else AMPLIFICATION)
    return same(expected, given, floor * max(magnitude(expected), 1e-6))


def _repairs(
    chosen: Exercise, judged: Sequence[Judgement], calls: Calls, *, worst: Judgement, line: int
) -> list[TracedValue]:
    """Return the smallest edits of the function that make every case right: the line of each, and as name its kind."""
    every = [(each.case, request_of(chosen, each.case.arguments, repeat=n == 0)) for n, each in enumerate(judged)]
    wrong = [pair for pair, each in zip(every, judged, strict=True) if each.problem and each is not worst]
    gradients = every[0][1].gradients if worst.about.startswith("∂") else ()
    for cost in MAX_EDITS:
        request = CallRequest(worst.case.arguments, gradients, line=line, cost=cost)
        tried = calls([request])[0]
        right = {each.number for each in tried.repairs if not judge(chosen, worst.case, each).problem}
        for cases in filter(None, (wrong[-1:], every)):  # most edits are wrong in the first of these already
            if numbers := sorted(right)[:MAX_VERIFIED]:
                results = calls([each._replace(line=line, cost=cost, numbers=numbers) for _, each in cases])
                right = set(numbers)
                for (case, _), result in zip(cases, results, strict=True):
                    right &= {one.number for one in result.repairs if not judge(chosen, case, one).problem}
        if right:
            return [each.steps[0] for each in tried.repairs if each.number in right]
        if tried.error or tried.late:
            break  # those of a larger cost are not faster
    return []


def _said(repair: TracedValue, repairs: Sequence[TracedValue]) -> str:
    """Say which edit makes every case right, and in which other lines one does."""
    others = list(dict.fromkeys(str(each.line) for each in repairs if each.line != repair.line))[:MAX_OTHERS]
    also = f" (or with a change in line {' or '.join(others)})" if others else ""
    return f"with {repair.name} in line {repair.line}{also}, every case is right"


def _gives(chosen: Exercise, mistake: Mistake, judged: Judgement) -> bool:
    """Return whether a known mistake gives the result that was judged, or fails where that failed."""
    made, case = call(chosen.function(mistake), request_of(chosen, judged.case.arguments), ""), judged.case
    if made.error or judged.result.error:
        return bool(made.error) and bool(judged.result.error)
    values = made.named(chosen.outputs)
    tolerances = {name: max(case.tolerances[name], FLOORS[torch.float64] * magnitude(values[name])) for name in values}
    return not judge(chosen, Case("", {}, values, tolerances), judged.result).problem


def _right_alone(chosen: Exercise, worst: Judgement, calls: Calls) -> bool:
    """Return whether each row of a batch would have been right alone, if the reference treats rows separately."""
    arguments, name = worst.case.arguments, worst.about
    rows = {key: value.split(1) for key, value in arguments.items() if key in chosen.batch and hasattr(value, "split")}
    slices = [arguments | dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=False)]
    alone = [each for sliced in slices for each in conditioned(chosen, sliced)] if len(slices) > 1 else []
    separate = [each.expected[name] for each in alone]
    whole = bool(alone) and all(isinstance(each, Tensor) and each.dim() for each in separate)
    if not whole or not worst.case.holds(name, torch.cat(separate)):
        return False
    results = calls([CallRequest(each.arguments) for each in alone])
    return not any(judge(chosen, each, result).problem for each, result in zip(alone, results, strict=True))
