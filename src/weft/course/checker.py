"""Checks a student's function against a reference, and explains the first tensor that differs.

The result alone decides. Variables that are named as in the exercise only help to find where it went wrong.
"""

import copy
import inspect
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from weft.api.arguments import checked
from weft.course.attempt import CASES, FORKS, NOTHING, RESULTS, confined
from weft.course.calls import CallResult, Case, call, late, repairs, time_limit
from weft.course.cases import Judgement, draw_cases, judge
from weft.course.confine import Limits
from weft.course.diagnosis import Calls, diagnose
from weft.course.exercises import FOLDER, Exercise, exercise, record_progress
from weft.course.explanation import Explanation
from weft.course.values import Draw
from weft.errors import ConfigError
from weft.workers import Children

SECONDS = 10  # of CPU time for a submission
EDIT_LIMITS = Limits(SECONDS, memory=1 << 28)  # of the edits of a function
SIZES = (40, 160)  # for which the executed lines are counted; a quadratic loop executes 16 times as many
MAX_GROWTH = 8.0


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
    defaults = _copies(getattr(function, "__defaults__", None) or ())

    def calls(cases: Sequence[Case]) -> list[CallResult]:
        if defaults:  # as in a new process
            function.__defaults__ = _copies(defaults)
        if not cases[0].expected:
            with time_limit(SECONDS, file):
                return [call(function, each, file) for each in cases]
        linecache.getlines(file)  # the copy cannot read every file
        answer = confined(lambda _: iter([repairs(function, cases, file)]), EDIT_LIMITS) if FORKS else NOTHING
        return _results(answer, 1, "")

    return calls


def _copies(defaults: Sequence[Any]) -> tuple[Any, ...]:
    """Copy the default arguments that a function can change."""
    return tuple(copy.deepcopy(each) if isinstance(each, list | dict | set) else each for each in defaults)


def check_file(
    chosen: Exercise, source: str, children: Children, *, secret: str = "", seconds: int = SECONDS
) -> Explanation:
    """Check the code of a submission in limited processes, each with `seconds` of CPU time."""
    hidden = [str(folder.resolve()) for folder in (FOLDER, chosen.folder.parent)]
    request, whole = {"name": chosen.name, "source": source}, Limits(seconds, hidden=hidden)
    weak: set[str] = set()  # limits that the system did not enforce

    def calls(cases: Sequence[Case]) -> list[CallResult]:
        limits = EDIT_LIMITS._replace(hidden=hidden) if cases[0].expected else whole
        try:
            with children.acquire() as child:
                answer = child.request({**request, "limits": limits, "cases": CASES.dump_python(list(cases))})
        except OSError:
            answer = {**NOTHING, "reason": "it ended the process that runs it"}
        weak.update(answer["weak"])
        return _results(answer, len(cases), source)

    return examine(chosen, calls, secret=secret)._replace(weak=tuple(sorted(weak)))


def _results(answer: dict[str, Any], count: int, source: str) -> list[CallResult]:
    """Return as many results as there were calls."""
    found = list(map(_read, answer["lines"][:count]))
    missing = late(answer["reason"], answer["stack"], source) if answer["stack"] else CallResult(error=answer["reason"])
    missing = missing._replace(loaded=not answer["loading"])
    return found + [missing] * (count - len(found))


def _read(line: str) -> CallResult:
    """Read a result, which a student's code may have made up."""
    try:
        return RESULTS.validate_json(line)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # RecursionError is a RuntimeError
        return CallResult(error="the answer cannot be read")


def examine(chosen: Exercise, calls: Calls, *, secret: str = "") -> Explanation:
    """Check a function that `calls` calls; a secret draws other cases than those that students see."""
    judged = _judged(chosen, calls, secret)
    passed = sum(not each.problem for each in judged)
    if passed == len(judged):
        found = Explanation(chosen.name, chosen.title, problem=_growth(chosen, calls))
    else:  # a process that tries edits knows what is expected, but never what a secret case expects
        found = diagnose(chosen, judged, calls, known=_judged(chosen, calls, "") if secret else judged)
    return found._replace(passed=passed, cases=len(judged), printed=judged[0].result.printed)


def _judged(chosen: Exercise, calls: Calls, secret: str) -> list[Judgement]:
    cases = draw_cases(chosen, secret)
    results = calls([case._replace(expected={}, tolerances={}) for case in cases])
    return [judge(chosen, case, result) for case, result in zip(cases, results, strict=True)]


def _growth(chosen: Exercise, calls: Calls) -> str:
    """Name a loop that grows with the square of the size, if the reference's `growth` forbids one."""
    if (growth := getattr(chosen.reference(), "growth", None)) is None:
        return ""
    few, many = calls([Case(growth(Draw(0), size), count_lines=True) for size in SIZES])
    quadratic = many.error or many.lines > MAX_GROWTH * max(few.lines, 10)
    return "its loops grow with the square of the input's length; one pass is enough" if quadratic else ""
