"""Faulty variants made from the references by mutation: the first wrong tensor, the line or the cause is named."""

import ast
import copy
from collections.abc import Iterator

import pytest
from tests.course.test_exercises import EXERCISES, checked

from weft.course.exercises import Exercise, Mistake

PER_EXERCISE = 5
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.MatMult: ast.Mult,
}
COMPARED: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}


def mutants(exercise: Exercise) -> Iterator[Mistake]:
    """Change one operator, axis, sign or number of the function at a time."""
    text = (exercise.folder / "reference.py").read_text()
    tree = ast.parse(text)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == exercise.name)
    segment = ast.get_source_segment(text, function)
    assert segment is not None
    for number, _ in enumerate(ast.walk(function)):
        changed = copy.deepcopy(function)
        node = list(ast.walk(changed))[number]
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            node.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            node.ops[0] = COMPARED[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
            node.value += 1
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node.op = ast.UAdd()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("sum", "mean"):
            node.func.attr = "mean" if node.func.attr == "sum" else "sum"
        else:
            continue
        yield Mistake(says="mutant", change=((segment, ast.unparse(changed)),))


def some(exercise: Exercise) -> list[Mistake]:
    every = list(mutants(exercise))
    return every[:: max(1, len(every) // PER_EXERCISE)][:PER_EXERCISE]


@pytest.mark.timeout(600)
def test_the_place_of_a_fault_is_named() -> None:
    named, unnamed = 0, []
    for exercise in EXERCISES:
        for mutant in some(exercise):
            module = exercise.reference(mutant)
            found = checked(exercise, getattr(module, exercise.name), module.__file__ or "")
            if found.holds:
                continue  # equivalent
            if found.line or found.tensor or found.mistake:
                named += 1
            else:
                unnamed.append(f"{exercise.name}: {found}")
    assert named >= 130
    assert named >= 0.9 * (named + len(unnamed)), "\n\n".join(unnamed)
