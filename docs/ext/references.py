"""What a page may point at: a name in a source file, a fact of the lectures, a setting, a command. Without Sphinx."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from ext.pages import ROOT
from weft.cli.main import program
from weft.config import Config, members_of, tag_of
from weft.recipe.config import Recipe

SOURCE = re.compile(r"\{src\}`([^`]+)`")
FACT = re.compile(r"\{fact\}`([^`]+)`")


def source(target: str) -> tuple[str, int]:
    """'weft/nn/attention.py:SelfAttention.forward' → the file's path in the checkout, and the line of the name."""
    path, _, name = target.partition(":")
    file = next((file for file in (ROOT / "src" / path, ROOT / path) if file.is_file()), None)
    if file is None:
        raise LookupError(f"{path}: no such file in src/ or the checkout")
    lines = [line for known, line in _names(file) if known == name] if name else [1]
    if not lines:
        raise LookupError(f"{path}: no '{name}' is defined in it")
    return file.relative_to(ROOT).as_posix(), lines[0]


@cache
def _names(file: Path) -> list[tuple[str, int]]:
    return list(_defined(ast.parse(file.read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, int]]:
    for each in body:
        match each:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{inside}{each.name}", each.lineno
                yield from _defined(each.body, f"{inside}{each.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{inside}{name}", each.lineno


def fact(name: str) -> str:
    """The file that holds a fact: 'F5' → 'tests/lectures/test_f05_perplexity.py'."""
    files = sorted((ROOT / "tests" / "lectures").glob("test_f[0-9][0-9]_*.py"))
    for file in files:
        if re.fullmatch(r"F[1-9]\d*", name) and file.name.startswith(f"test_f{int(name[1:]):02}_"):
            return file.relative_to(ROOT).as_posix()
    raise LookupError(f"{name}: no such fact; there are F1 to F{len(files)}")


# ---- settings


@cache
def tables() -> dict[str, list[type[Config]]]:
    """Every table of a recipe by its dotted key, with the config types that it may be; '' is the recipe itself."""
    found: dict[str, list[type[Config]]] = {"": [Recipe]}
    todo: list[tuple[str, type[Config]]] = [("", Recipe)]
    for inside, kind in todo:
        for name, its in kind.model_fields.items():
            key = f"{inside}{name}"
            for member in kinds_of(its):
                if member not in found.setdefault(key, []):
                    found[key].append(member)
                    todo.append((f"{key}.", member))
    return found


def kinds_of(its: FieldInfo) -> list[type[Config]]:
    """The config types that a setting may be, or that the entries of its list are."""
    if get_origin(its.annotation) is tuple:
        return [each for each in get_args(its.annotation) if isinstance(each, type) and issubclass(each, Config)]
    return members_of(its)


@cache
def first(table: str) -> str:
    """The first table of the recipe whose types are those of this one: where they are described."""
    return next(key for key, kinds in tables().items() if set(tables()[table]) <= set(kinds))


@cache
def keys() -> dict[str, str]:
    """Every dotted key of a recipe, and the anchor of the place that describes it."""
    found: dict[str, str] = {}
    for table, kinds in tables().items():
        for kind in kinds:
            for name in kind.model_fields:
                found.setdefault(f"{table}.{name}".lstrip("."), anchor(first(table), kind))
    return found


def anchor(table: str, kind: type[Config] | None = None) -> str:
    """Where a table, or a variant of one that comes in several, stands on the page of the settings."""
    words = ("setting", table, tag_of(kind) if kind is not None and len(tables()[table]) > 1 else None)
    return re.sub(r"\W|_", "-", "-".join(filter(None, words)))


def setting(text: str) -> str:
    """The anchor of a setting: of 'optimizer.lr', of a whole table, or with its value: 'steps=60', 'optimizer=muon'."""
    key, _, value = text.partition("=")
    if key not in keys():
        raise LookupError(f"{key}: no such setting")
    for kind in tables().get(key, ()):
        if value and value == tag_of(kind):
            return anchor(first(key), kind)
    return anchor(first(key)) if key in tables() else keys()[key]


# ---- commands


def commands() -> dict[str, Any]:
    """Every command by its name, 'weft train' or 'weft config show', in the order of the help."""
    found: dict[str, Any] = {}
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        found[f"weft {name}"] = command
        for below, inner in getattr(command, "commands", {}).items():
            found[f"weft {name} {below}"] = inner
    return found


def command(text: str) -> str:
    """The anchor of a command, which may be given with options: 'weft train', 'weft train --resume'."""
    words = text.split()
    named = [" ".join(words[:length]) for length in (3, 2)]
    name = next((each for each in named if each in commands()), None)
    if name is None:
        raise LookupError(f"{text}: no such command")
    options = {option for param in commands()[name].params for option in param.opts}
    for word in words:
        if word.startswith("-") and word not in options:
            raise LookupError(f"{text}: {name} has no option {word}")
    return name.replace(" ", "-")
