"""Faulty variants made by mutation of right answers: the line at fault or the first wrong variable is named."""

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.course.test_exercises import EXERCISES, VARIANTS
from tests.lectures.textbook.lecture import load_file

from weft.course.checker import calls_here, examine
from weft.course.exercises import Exercise

MUTANTS, SHARE, WRONG = 240, 0.9, 0.05  # number, and shares in which the place is named, and another one
OPERATORS: list[type[ast.operator]] = [ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.FloorDiv, ast.Mod]
COMPARED: list[type[ast.cmpop]] = [ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq]
PAIRS = ["sum mean", "max min", "amax amin", "sin cos", "sigmoid tanh", "exp log", "zeros ones", "triu tril", "any all"]
TWINS = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}


def mutations(node: ast.expr, rng: random.Random) -> Iterator[ast.AST]:
    """Yield faulty forms of an expression."""

    def other(**fields: Any) -> ast.AST:
        changed = copy.copy(node)
        vars(changed).update(fields)
        return changed

    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield other(op=rng.choice([each for each in OPERATORS if each is not type(op)])())
            yield left
            yield other(left=right, right=left)
        case ast.Compare(_, [op], _) if type(op) in COMPARED:
            yield other(ops=[rng.choice([each for each in COMPARED if each is not type(op)])()])
        case ast.Constant(int() as value):
            yield other(value=not value if isinstance(value, bool) else value + rng.choice((-1, 1)))
        case ast.UnaryOp(_, value) | ast.Attribute(value, "T" | "mT"):
            yield value
        case ast.Call(function, arguments, keywords):
            if isinstance(function, ast.Attribute) and function.attr in ("clone", "sqrt", "square", "transpose", "exp"):
                yield function.value
            if len(arguments) > 1:
                yield other(args=[arguments[1], arguments[0], *arguments[2:]])
            if keywords:
                yield other(keywords=keywords[1:])
    for field in ("attr", "id"):
        if twin := TWINS.get(getattr(node, field, "")):
            yield other(**{field: twin})


def mutants(path: Path, name: str, rng: random.Random) -> Iterator[tuple[str, int, set[str]]]:
    """Yield faulty texts of a module, each with the line that was changed and the variables that it assigns."""
    text = ast.unparse(ast.parse(path.read_text()))  # a statement per line
    lines = [line.encode() for line in text.splitlines()]
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    for statement in (n for part in function.body for n in ast.walk(part) if isinstance(n, ast.stmt)):
        if isinstance(statement, ast.For | ast.While | ast.If | ast.FunctionDef | ast.AnnAssign):
            continue
        assigned = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in (n for n in ast.walk(statement) if isinstance(n, ast.expr)):
            for faulty in mutations(node, rng):
                at, line = node.lineno - 1, lines[node.lineno - 1]
                new = line[: node.col_offset] + f"({ast.unparse(faulty)})".encode() + line[node.end_col_offset :]
                yield b"\n".join([*lines[:at], new, *lines[at + 1 :]]).decode(), node.lineno, assigned


def sampled() -> list[tuple[Exercise, str, str, int, set[str]]]:
    """Draw mutants of references and of variants, the same in every run."""
    rng, found = random.Random(0), list[tuple[Exercise, str, str, int, set[str]]]()
    for exercise in EXERCISES:
        for path in (exercise.folder / "reference.py", VARIANTS / f"{exercise.name}.py"):
            names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
            for name in [exercise.name] if path.name == "reference.py" else [n for n in names if n[0] != "_"]:
                every = [(exercise, name, *mutant) for mutant in mutants(path, name, rng)]
                found += rng.sample(every, min(3, len(every)))
    return rng.sample(found, MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, pytest.param(MUTANTS, marks=pytest.mark.timeout(1800))])
def test_the_place_of_a_fault_is_named(number: int, tmp_path: Path) -> None:
    """Among few, those that are named are named rightly; among many, nearly all are named."""
    faulty, right, wrong = 0, 0, list[str]()
    for index, (exercise, name, text, line, assigned) in enumerate(sampled()[:number]):
        path = tmp_path / f"m{index}_{exercise.name}.py"
        path.write_text(text)
        function = getattr(load_file(path, path.stem), name)
        found = examine(exercise, calls_here(function))
        if not found.holds:
            faulty += 1
            right += found.line == line or found.tensor in assigned
            if found.line not in (0, line) and found.tensor not in assigned:
                wrong.append(f"{exercise.name}, {name}, line {line}: {found}")
    assert 2 * faulty > number
    assert right >= SHARE * faulty - 1 and len(wrong) <= WRONG * faulty, "\n\n".join(wrong)
