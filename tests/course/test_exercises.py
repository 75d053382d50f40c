"""Every exercise: the reference passes, the hole fails with a sentence, mistakes are recognised, variants pass."""

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lectures.textbook.lecture import load_file
from tests.spread import spread

from weft.course.calls import CallResult, call
from weft.course.checker import examine
from weft.course.exercises import Exercise, exercises
from weft.course.explanation import Explanation

VARIANTS = Path(__file__).parent / "variants"
EXERCISES = list(exercises().values())
MISTAKES = [(each, number) for each in EXERCISES for number in range(len(each.mistakes))]


def checked(exercise: Exercise, function: Callable[..., Any], file: str) -> Explanation:
    def calls(cases: Any) -> list[CallResult]:
        return [call(function, each, file) if not each.expected else CallResult() for each in cases]

    return examine(exercise, calls)


def variants(name: str) -> dict[str, Callable[..., Any]]:
    module = load_file(VARIANTS / f"{name}.py", f"variants_{name}")
    return {
        key: each
        for key, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and key[0] != "_"
    }


def test_there_are_enough_for_every_lecture() -> None:
    counts = Counter(each.lecture for each in EXERCISES)
    assert sorted(counts) == [1, 2, 3, 4, 5]
    assert len(EXERCISES) >= 30 and min(counts.values()) >= 4


@pytest.mark.parametrize("exercise", spread(EXERCISES, keep=8), ids=lambda each: each.name)
def test_the_reference_passes_and_the_hole_does_not(exercise: Exercise) -> None:
    reference = exercise.reference()
    found = checked(exercise, getattr(reference, exercise.name), reference.__file__ or "")
    assert found.holds and found.cases >= 4, str(found)
    assert len(exercise.mistakes) >= 2
    ours, theirs = (
        ast.unparse(
            next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == exercise.name).args
        )
        for text in (exercise._read("hole.py"), Path(exercise.folder / "reference.py").read_text())
    )
    assert ours == theirs
    scope: dict[str, Any] = {}
    compile(exercise.starting_file(), "start", "exec")
    exec(exercise._read("hole.py"), scope)
    empty = checked(exercise, scope[exercise.name], "")
    assert not empty.holds and empty.passed == 0 and "fill the hole" in empty.problem
    assert {*exercise.outputs} - {*exercise.formulas} == set(), "each output has a formula"


@pytest.mark.parametrize(
    ("exercise", "number"), spread(MISTAKES, keep=16), ids=lambda each: getattr(each, "name", each)
)
def test_each_known_mistake_is_recognised(exercise: Exercise, number: int) -> None:
    module = exercise.reference(exercise.mistakes[number])
    found = checked(exercise, getattr(module, exercise.name), module.__file__ or "")
    assert not found.holds, exercise.mistakes[number].says
    assert found.mistake == exercise.mistakes[number].says, str(found)


@pytest.mark.parametrize("exercise", spread(EXERCISES, keep=8), ids=lambda each: each.name)
def test_correct_answers_in_other_manners_pass(exercise: Exercise) -> None:
    others = variants(exercise.name)
    assert len(others) >= 3
    for name, function in others.items():
        found = checked(exercise, function, str(VARIANTS / f"{exercise.name}.py"))
        assert found.holds, f"{name}: {found}"
