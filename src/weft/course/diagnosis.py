"""Diagnosis of a wrong function: the first tensor that differs, the edit that makes it right, and the known mistake."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from weft.course.calls import CallResult, Case, TracedValue, call
from weft.course.cases import AMPLIFICATION, ROUNDED, Judgement, conditioned, difference, judge
from weft.course.exercises import Exercise, Mistake
from weft.course.explanation import Explanation
from weft.course.values import FLOORS, is_float, magnitude, same

MAX_OTHERS = 2  # lines that are named besides that of an edit
Calls = Callable[[Sequence[Case]], list[CallResult]]


def diagnose(chosen: Exercise, judged: Sequence[Judgement], calls: Calls, *, known: Sequence[Judgement]) -> Explanation:
    """Explain the smallest case that is clearly wrong; first what is not about numbers, such as a changed argument.

    Edits are tried on the cases `known` to students.
    """
    failed = [each for each in judged if each.problem]
    worst = min(failed, key=lambda e: (bool(e.about or e.result.error), ROUNDED in e.problem, e.case.size))
    worst = next((each for each in failed if each.result.late), worst)
    case, result = worst.case, worst.result
    everywhere = len(failed) == len(judged) and len({each.problem for each in judged}) == 1
    step, expected, problem = TracedValue("", result.line, result.text, None), None, worst.problem
    if _other_order(chosen, worst):
        problem = f"its results are right, but in another order: return {', '.join(chosen.outputs)}"
    elif result.late:
        problem += f", in the case “{case.name}”" if result.loaded else ""
    elif worst.about or (result.line and result.loaded):
        step, expected, wrong = _first_step(chosen, worst, calls)
        if expected is not None and step.name != worst.about:
            problem = difference(case, step.name, expected=expected, given=step.value)
            problem += f"; then {worst.problem}" if result.error else ""
        problem += "" if wrong else "; called alone it is right: it keeps something from earlier calls"
    elif result.changed:
        changes = calls([Case(case.arguments, watch=result.changed[:1])])[0].steps
        step = next((each for each in changes if each.name != "return"), step)._replace(name="", uses=())
    numeric = bool(worst.about or result.line or result.changed) and result.loaded
    repairs = _repairs(known, calls, worst=worst, line=step.line) if numeric else []
    repair = next((each for each in repairs if each.line == step.line and step.name), next(iter(repairs), None))
    if repair is not None:
        step = step._replace(line=repair.line, text=repair.text)
    elif step.uses and result.error:  # these may be wrong as well
        step, expected, problem = TracedValue("", result.line, result.text, None), None, worst.problem
    elif step.uses:
        step = step._replace(line=0)
    mistakes = chosen.mistakes if not result.late else ()
    mistake = next((m for m in mistakes if all(_gives(chosen, m, each) for each in judged)), None)
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


def _first_step(chosen: Exercise, worst: Judgement, calls: Calls) -> tuple[TracedValue, Any, bool]:
    """Return the first watched variable with another value than in the reference, that value, and whether it is wrong.

    Without any, it is the wrong output at the line that computes it, or the line that raised an error. The last is
    False if a call of this case alone is right.
    """
    case, error, watched = worst.case, worst.result.error, list(chosen.formulas)
    request = Case(case.arguments, watch=watched)
    ours = call(chosen.function(), request, str(chosen.folder / "reference.py")).steps
    alone = calls([request])[0]
    theirs, wrong = alone.steps, worst.about.startswith("∂") or bool(judge(chosen, case, alone).problem)
    returned = next((each for each in reversed(theirs) if each.name == "return"), TracedValue("", 0, "", None))
    texts = _outputs(returned.text, chosen.outputs)
    fine = [text for name, text in texts.items() if not error and case.holds(name, worst.parts[name])]
    pairs = list(_aligned(ours, theirs, failed=bool(error)))
    right = [(step, any(_close(step.value, each.value) for each in given)) for step, given in pairs]
    for position, (step, given) in enumerate(pairs):
        if right[position][1] or type(step.value) is not type(given[-1].value):
            continue
        uses = re.compile(rf"\b{step.name}\b")  # what is computed from it correctly shows that its name means another
        later = [each.text for each, holds in right[position:] if holds and each.name != step.name]
        final = next(each.value for each in reversed(theirs) if each.name == step.name)
        returns_other = step.name in worst.parts and not same(worst.parts[step.name], final)
        if returns_other or any(map(uses.search, later if step.name in chosen.outputs else [*later, *fine])):
            continue
        found, missed = _verified(given[-1], right), _count(theirs, step.name) < _count(ours, step.name)
        return found._replace(uses=(*found.uses, "a loop")) if missed else found, step.value, wrong
    if error:
        return TracedValue("", worst.result.line, worst.result.text, None), None, wrong
    about, text = worst.about, texts.get(worst.about, returned.text)
    own = [each.value for each in theirs if each.name == about]
    if own and case.holds(about, own[-1]):
        returned = returned._replace(uses=())  # computed rightly, but something else is returned
    elif text.isidentifier() and text not in watched:
        steps = calls([request._replace(watch=[*watched, text])])[0].steps
        returned = next((each for each in reversed(steps) if each.name == text), returned)
    else:
        returned = returned._replace(uses=tuple(each for each in returned.uses if re.search(rf"\b{each}\b", text)))
    shown = returned._replace(name=about, value=worst.parts[about])
    return _verified(shown, right), case.expected.get(about), wrong


def _count(steps: Sequence[TracedValue], name: str) -> int:
    return sum(each.name == name for each in steps)


def _outputs(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return the expression of each output in the text of a return; nothing if it cannot be read."""
    with suppress(SyntaxError, AttributeError, ValueError, IndexError):
        value: Any = ast.parse(text.removeprefix("return ")).body[0]
        parts = [value.value] if len(names) == 1 else value.value.elts
        return dict(zip(names, map(ast.unparse, parts), strict=True))
    return {}


def _verified(step: TracedValue, right: Sequence[tuple[TracedValue, bool]]) -> TracedValue:
    """Leave of what a line uses only those variables that were not found to be right."""
    holds = {each.name for each, fine in right if fine} - {each.name for each, fine in right if not fine}
    return step._replace(uses=tuple(name for name in step.uses if name not in holds))


def _aligned(
    ours: Sequence[TracedValue], theirs: Sequence[TracedValue], *, failed: bool
) -> Iterator[tuple[TracedValue, list[TracedValue]]]:
    """Yield each step of the reference with those of the function that it can be compared with."""
    for position, step in enumerate(ours):
        number, count = (_count(part, step.name) for part in (ours[:position], ours))
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


def _repairs(judged: Sequence[Judgement], calls: Calls, *, worst: Judgement, line: int) -> list[TracedValue]:
    """Return the smallest edits of the function that make every case right: the line of each, and as name its kind."""
    differentiated = worst.about.startswith("∂")
    tried = [
        each.case._replace(gradients=each.case.gradients if differentiated else (), line=line, count_lines=True)
        for each in judged
        if each.problem and each.about.startswith("∂") == differentiated
    ]
    return list(calls([*tried, *(each.case for each in judged)])[0].steps) if tried else []


def _said(repair: TracedValue, repairs: Sequence[TracedValue]) -> str:
    """Say which edit makes every case right, and in which other lines one does."""
    others = list(dict.fromkeys(str(each.line) for each in repairs if each.line != repair.line))[:MAX_OTHERS]
    also = f" (or with a change in line {' or '.join(others)})" if others else ""
    return f"with {repair.name} in line {repair.line}{also}, every case is right"


def _gives(chosen: Exercise, mistake: Mistake, judged: Judgement) -> bool:
    """Return whether a known mistake gives the result that was judged, or fails where that failed."""
    case = judged.case._replace(repeat=False)
    made = call(chosen.function(mistake), case, "")
    if made.error or judged.result.error:
        return bool(made.error) and bool(judged.result.error)
    values = made.named(chosen.outputs)
    tolerances = {name: max(case.tolerances[name], FLOORS[torch.float64] * magnitude(values[name])) for name in values}
    return not judge(chosen, case._replace(expected=values, tolerances=tolerances), judged.result).problem


def _right_alone(chosen: Exercise, worst: Judgement, calls: Calls) -> bool:
    """Return whether each row of a batch would have been right alone, if the reference treats rows separately."""
    arguments, name = worst.case.arguments, worst.about
    rows = {key: value.split(1) for key, value in arguments.items() if key in chosen.batch and hasattr(value, "split")}
    slices = [arguments | dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=False)]
    alone = [each for sliced in slices for each in conditioned(chosen, Case(sliced))] if len(slices) > 1 else []
    separate = [each.expected[name] for each in alone]
    whole = bool(alone) and all(isinstance(each, Tensor) and each.dim() for each in separate)
    if not whole or not worst.case.holds(name, torch.cat(separate)):
        return False
    results = calls([Case(each.arguments) for each in alone])
    return not any(judge(chosen, each, result).problem for each, result in zip(alone, results, strict=True))
