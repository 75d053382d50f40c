"""Small edits of a student's function; where one of them makes every case right, its line is at fault.

The grammar, the order and the number of the edits are fixed, as is the number of lines that they execute, so that an
answer is the same on any machine. Of an edit, students see the line and the kind, not the text.
"""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import combinations, islice, product
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from weft.config import read_toml

MAX_EDITS = {1: 800, 2: 1500, 3: 400, 4: 450, 5: 200}  # by cost; nearly all that help are among the first 400
MAX_EXPONENT = 64
GRAMMAR = read_toml(Path(__file__).with_name("repairs.toml"))
# parents of an "expr" of the grammar, unless it names others
PARENTS = ("stmt", "BinOp", "Call", "Tuple", "GeneratorExp", "ListComp", "DictComp")
UNCHANGED = ("annotation", "returns", "decorator_list", "op", "ops", "ctx")
Slot = tuple[int, ast.AST, str, int | None, ast.AST]  # line, parent, its field, index if that is a list, and the node


class Edit(NamedTuple):
    """Edit of a line: `kind` in words, and nodes of the tree, each with a field and its new value."""

    kind: str
    line: int
    changes: tuple[tuple[Any, str, Any], ...]


def edited(function: Callable[..., Any], cost: int, line: int) -> Iterator[tuple[Edit, Callable[..., Any]]]:
    """Yield the first edits of this cost, of a function and of those that it calls, each with the edited function.

    Those of this line come first, then those above it, then the others.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return
    sources, scope = _sources(function), {"math": math, "torch": torch, **function.__globals__, "_power": _power}
    for tree, original in sources:
        scope[original.__name__] = _compiled(tree, original, scope)
    slots = [(source, slot) for source in sources for slot in _slots(source[0])]
    slots.sort(key=lambda each: (each[1][0] > line, abs(each[1][0] - line)))
    edits = ((*source, edit) for source, slot in slots for edit in _edits(source[0], slot, cost))
    for tree, original, edit in list(islice(edits, MAX_EDITS[cost])):
        before = [(node, field, getattr(node, field)) for node, field, _ in edit.changes]
        unchanged = scope[original.__name__]
        try:
            for node, field, value in edit.changes:
                setattr(node, field, value)
            scope[original.__name__] = _compiled(tree, original, scope)
            yield edit, scope[function.__name__]
        except (SyntaxError, ValueError, TypeError):  # what cannot be compiled
            continue
        finally:
            for node, field, value in before:
                setattr(node, field, value)
            scope[original.__name__] = unchanged


def _compiled(tree: ast.FunctionDef, original: FunctionType, scope: dict[str, Any]) -> FunctionType:
    """Return the function of a tree, which looks up its global names in `scope`."""
    module = compile(ast.Module([tree], []), original.__code__.co_filename, "exec")
    code = next(each for each in module.co_consts if isinstance(each, CodeType) and each.co_name == tree.name)
    changed = FunctionType(code, scope, tree.name, original.__defaults__)
    changed.__kwdefaults__ = original.__kwdefaults__
    return changed


def _sources(function: FunctionType) -> list[tuple[ast.FunctionDef, FunctionType]]:
    """Return the trees of a function and of those of its module that it calls."""
    functions, found = [function], list[tuple[ast.FunctionDef, FunctionType]]()
    for each in functions:
        try:
            lines, first = inspect.getsourcelines(each)
            tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            break
        if not isinstance(tree, ast.FunctionDef) or each.__closure__ or tree.name != each.__name__:
            break
        found.append((ast.increment_lineno(tree, first - 1), each))
        tree.body = tree.body[ast.get_docstring(tree) is not None :]
        for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            called = each.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__ == each.__module__ and called not in functions:
                functions.append(called)
    return found


def _power(base: Any, exponent: Any) -> Any:
    """Return a power, but no integer of thousands of digits, which takes minutes."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > MAX_EXPONENT:
        raise OverflowError
    return base**exponent


@lru_cache(maxsize=8)
def _names(tree: ast.FunctionDef) -> dict[str, list[Any]]:
    """Return what a template can name: variables of a function, those it never uses, its conditions; and exponents."""
    nodes = list(ast.walk(tree))
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
    used, assigned = (
        [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)]
        for context in (ast.Load, ast.Store)
    )
    names = list(dict.fromkeys([*arguments, *assigned]))
    powers = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    conditions = dict.fromkeys(ast.unparse(node.test) for node in nodes if isinstance(node, ast.IfExp | ast.If))
    unused, exponents = [name for name in names if name not in used], [n for each in powers for n in ast.walk(each)]
    return {"name": names, "unused": unused, "condition": list(conditions), "exponent": exponents}


def _edits(tree: ast.FunctionDef, slot: Slot, cost: int) -> Iterator[Edit]:
    """Yield the edits of a node that have this cost."""
    (line, owner, field, index, node), names = slot, _names(tree)
    for kind, new in _replacements(node, owner, names, cost=cost):
        listed = getattr(owner, field)
        yield Edit(kind, line, ((owner, field, new[0] if index is None else _spliced(listed, index, new)),))
    yield from (Edit(kind, line, (tuple(change),)) for each, kind, *change in _changes(node) if each == cost)
    if isinstance(node, ast.stmt) and index is not None:
        yield from (edit for each, edit in _block_edits(owner, field, index, names=names["name"]) if each == cost)


def _slots(node: ast.AST) -> Iterator[Slot]:
    """Yield each node below one."""
    for field, value in ast.iter_fields(node):
        listed = isinstance(value, list)
        for index, each in enumerate(value if listed else [value]):
            if isinstance(each, ast.AST) and field not in UNCHANGED and not isinstance(each, ast.arguments):
                line = getattr(each, "lineno", getattr(node, "lineno", 0))
                yield line, node, field, index if listed else None, each
                yield from _slots(each)


def _spliced(listed: list[Any], at: int, new: Sequence[Any]) -> list[Any]:
    """Return a list with others instead of one element."""
    return [*listed[:at], *new, *listed[at + 1 :]]


@lru_cache(maxsize=8192)
def _parsed(text: str, before: str) -> list[ast.stmt]:
    """Return other statements than those before; none if the text is wrong, or only has more parentheses."""
    try:
        return [] if re.sub("[()]", "", text) == re.sub("[()]", "", before) else ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


def _replacements(
    node: ast.AST, owner: ast.AST, names: dict[str, list[Any]], *, cost: int
) -> Iterator[tuple[str, Sequence[ast.AST]]]:
    """Yield what may stand instead of a node, each with its kind, by the templates of the grammar."""
    if not isinstance(node, ast.stmt | ast.expr) or not isinstance(getattr(node, "ctx", None), ast.Load | None):
        return
    fields = {"text": ast.unparse(node)} | {
        key: ast.unparse(each)
        for field, value in ast.iter_fields(node)
        for key, each in (
            [(f"{field}{n}", v) for n, v in enumerate(value)] if isinstance(value, list) else [(field, value)]
        )
        if isinstance(each, ast.expr)
    }
    if fields.get("value") == "torch":
        fields["torch"] = ""  # torch.float32 and its like
    if isinstance(node, ast.Call):
        fields["call"] = fields["text"][:-1] + (", " if node.args or node.keywords else "")
        if isinstance(node.func, ast.Attribute):
            fields["object"] = ast.unparse(node.func.value)
    for rule in GRAMMAR["replacements"]:
        if rule["cost"] != cost or not isinstance(node, getattr(ast, rule["of"])):
            continue
        parents = tuple(getattr(ast, each) for each in rule.get("parents", PARENTS))
        constant = isinstance(node, ast.Constant) and "parents" not in rule
        if rule["of"] == "expr" and (constant or not isinstance(owner, parents)):
            continue
        for template in rule["texts"]:
            if "_power" in template and node in names["exponent"]:
                continue  # no tower of powers
            keys = [each for each in ("name", "unused", "condition") if f"{{{each}}}" in template]
            for values in product(*map(names.__getitem__, keys)):
                with suppress(KeyError):
                    text = template.format(**fields, **dict(zip(keys, values, strict=True)))
                    for new in _parsed(text, fields["text"]):
                        yield rule["kind"], [new if isinstance(node, ast.stmt) else getattr(new, "value", node)]


def _changes(node: ast.AST) -> Iterator[tuple[Any, ...]]:
    """Yield changes of a node's own fields, each with its cost and its kind."""
    for field in ("args", "elts", "values", "keywords", "ifs"):
        value = getattr(node, field, None)
        listed = value if isinstance(value, list) else []
        for a, b in combinations(range(min(len(listed), 5)), 2) if field in ("args", "elts", "values") else ():
            yield 1, "another order", node, field, _spliced(_spliced(listed, a, [listed[b]]), b, [listed[a]])
        yield from ((2, "a part less", node, field, _spliced(listed, number, [])) for number in range(len(listed)))
    for field, other in (("lower", "1"), ("upper", "-1"), ("step", None)) if isinstance(node, ast.Slice) else ():
        if getattr(node, field) is not None:
            yield 1, "another range", node, field, None
        elif other is not None:
            yield 1, "another range", node, field, ast.parse(other, mode="eval").body
    for field in ("attr", "id"):
        for group in GRAMMAR["twins"]:
            for other in group.split() if getattr(node, field, "") in group.split() else ():
                yield 1, "another function", node, field, other


def _block_edits(owner: ast.AST, field: str, at: int, *, names: list[str]) -> Iterator[tuple[int, Edit]]:
    """Yield edits of a statement's place, each with its cost: its order, its indentation, and a statement after it."""
    block: list[Any] = getattr(owner, field)
    statement, before, after, line = block[at], block[:at], block[at + 1 :], block[at].lineno

    def indented(moved: ast.stmt, block: list[Any], body: list[Any]) -> Edit:
        return Edit("another indentation", moved.lineno, ((owner, field, block), (statement, "body", body)))

    for to in sorted({*range(max(at - 4, 0), min(at + 5, len(block)))} - {at, at - 1}):
        moved = _spliced(block, at, [])
        moved.insert(to, statement)
        yield 1 if to == at + 1 else 2, Edit("another order of the statements", line, ((owner, field, moved),))
    if isinstance(statement, ast.For | ast.While | ast.If):
        body = statement.body
        if len(body) > 1:
            yield 1, indented(body[-1], [*before, statement, body[-1], *after], body[:-1])
        if after:
            yield 1, indented(after[0], [*before, statement, *after[1:]], [*body, after[0]])
        if before:
            yield 1, indented(before[-1], [*before[:-1], statement, *after], [before[-1], *body])
        yield 2, Edit("a condition less", line, ((owner, field, _spliced(block, at, body)),))
    if not isinstance(statement, ast.Return | ast.Break | ast.Continue):
        last = isinstance(owner, ast.For | ast.While) and not after
        own = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in names:
            texts = [f"{name} = {other}" for other in names if other != name and (last or other in own)]
            for text in [*texts, *([f"{name} += 1", f"{name} -= 1"] if last else [])]:
                new = [*before, statement, *_parsed(text, ""), *after]
                yield 3, Edit(f"a statement more, which changes {name},", line, ((owner, field, new),))
