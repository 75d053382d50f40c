"""References of a page to weft: source files, facts of the lectures, commands and settings.

Inline code is a reference if it looks like one, and then it has to exist: `weft/nn/mask.py:Mask` and `lectures/gpt.py`
name source files and definitions in them, `weft train --resume` a command with its options, `optimizer.lr=0.001` and
`tokenizer=char` settings. **F5** names a fact of the lectures, which is a test.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from markdown_it import MarkdownIt
from pydantic.fields import FieldInfo

from ext.pages import GENERATED, ROOT
from weft.cli.main import program
from weft.config import Config, members_of, tag_of
from weft.recipe.config import Recipe

SOURCE = re.compile(r"((?:src/)?weft|lectures|tests|benchmarks|docs)/[\w./-]*\w\.\w+(:[\w.]+)?")
COMMAND = re.compile(r"weft [a-z].*", re.DOTALL)
SETTING = re.compile(r"([a-z][a-z_]*)((?:\.[a-z_]+)*)(=[^\s\"].*)?")  # data="book.txt" is Python
FACT = re.compile(r"F\d+")
FILE_SUFFIXES = ("bin", "html", "json", "jsonl", "md", "pkl", "py", "safetensors", "toml", "txt")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def find(text: str) -> tuple[str, str] | None:
    """Return the file that inline code refers to, relative to the checkout, and the anchor in it.

    None if the text is no reference; LookupError if it looks like one whose target does not exist.
    """
    if SOURCE.fullmatch(text):
        path, line = source(text)
        return path, f"L-{line}"
    if COMMAND.fullmatch(text):
        return "docs/reference/commands.md", command(text)
    match = SETTING.fullmatch(text)
    if match and match[1] in Recipe.model_fields and (match[2] or match[3]):
        if match[2].rpartition(".")[2] in FILE_SUFFIXES:
            return None
        return "docs/reference/settings.md", setting(text)
    return None


def problems(text: str) -> list[str]:
    """Return what a page refers to that does not exist, apart from its generated parts."""
    found: list[str] = []
    inline = [
        token for block in MarkdownIt("commonmark").parse(GENERATED.sub("", text)) for token in block.children or ()
    ]
    for index, token in enumerate(inline):
        reference: Callable[[str], Any] | None = None
        if token.type == "code_inline":
            reference = find
        elif token.type == "text" and FACT.fullmatch(token.content) and inline[index - 1].type == "strong_open":
            reference = fact
        try:
            _ = reference and reference(" ".join(token.content.split()))
        except LookupError as error:
            found.append(str(error.args[0]))
    return found


# ---- source files


def source(target: str) -> tuple[str, int]:
    """Return the file of `weft/nn/attention.py:SelfAttention.forward`, relative to the checkout, and the line."""
    path, _, name = target.partition(":")
    file = next((file for file in (ROOT / "src" / path, ROOT / path) if file.is_file()), None)
    if file is None:
        raise LookupError(f"{path}: no such file in src/ or the checkout")
    lines = [line for known, line in _definitions(file) if known == name] if name else [1]
    if not lines:
        raise LookupError(f"{path}: does not define '{name}'")
    return file.relative_to(ROOT).as_posix(), lines[0]


@cache
def _definitions(file: Path) -> list[tuple[str, int]]:
    return list(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    for statement in body:
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{prefix}{statement.name}", statement.lineno
                yield from _names(statement.body, f"{prefix}{statement.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{prefix}{name}", statement.lineno


def fact(name: str) -> str:
    """Return the test that holds a fact of the lectures: `F5` → `tests/lectures/test_f05_perplexity.py`."""
    files = sorted((ROOT / "tests" / "lectures").glob("test_f[0-9][0-9]_*.py"))
    for file in files:
        if file.name.startswith(f"test_f{int(name[1:]):02}_"):
            return file.relative_to(ROOT).as_posix()
    raise LookupError(f"{name}: no such fact; there are F1 to F{len(files)}")


# ---- settings


@cache
def tables() -> dict[str, list[type[Config]]]:
    """Map every table of a recipe, by its dotted key, to the config types that it may have; '' is the recipe itself."""
    types: dict[str, list[type[Config]]] = {"": [Recipe]}
    queue: list[tuple[str, type[Config]]] = [("", Recipe)]
    for prefix, table in queue:
        for name, field in table.model_fields.items():
            key = f"{prefix}{name}"
            for variant in variants_of(field):
                if variant not in types.setdefault(key, []):
                    types[key].append(variant)
                    queue.append((f"{key}.", variant))
    return types


def variants_of(field: FieldInfo) -> list[type[Config]]:
    """Return the config types that a setting, or an entry of its list, may have."""
    if get_origin(field.annotation) is tuple:
        return [each for each in get_args(field.annotation) if isinstance(each, type) and issubclass(each, Config)]
    return members_of(field)


@cache
def described_at(table: str) -> str:
    """Return the first table of the recipe with the config types of this one: the reference describes them there."""
    return next(key for key, variants in tables().items() if set(tables()[table]) <= set(variants))


@cache
def setting_anchors() -> dict[str, str]:
    """Map every dotted key of a recipe to the anchor of its description."""
    anchors: dict[str, str] = {}
    for table, variants in tables().items():
        for variant in variants:
            for name in variant.model_fields:
                anchors.setdefault(f"{table}.{name}".lstrip("."), slug(heading(described_at(table), variant)))
    return anchors


def heading(table: str, variant: type[Config] | None = None) -> str:
    """Return the heading of a table in the reference, or of one variant of a table that has several."""
    if variant is not None and len(tables()[table]) > 1:
        return f'`{table}.kind = "{tag_of(variant)}"`'
    return f"`{table}`" if table else "The recipe"


def setting(text: str) -> str:
    """Return the anchor of a setting, which may have a value: `optimizer.lr`, `steps=60`, `optimizer=muon`."""
    key, _, value = text.partition("=")
    if key not in setting_anchors():
        raise LookupError(f"{key}: no such setting")
    for variant in tables().get(key, ()):
        if value and value == tag_of(variant):
            return slug(heading(described_at(key), variant))
    return slug(heading(described_at(key))) if key in tables() else setting_anchors()[key]


# ---- commands


@cache
def commands() -> dict[str, Any]:
    """Map the name of every command, `weft train` or `weft config show`, to the command, in the order of the help."""
    found: dict[str, Any] = {}
    for name, group in program.commands.items():  # type: ignore[attr-defined]
        found[f"weft {name}"] = group
        for below, subcommand in getattr(group, "commands", {}).items():
            found[f"weft {name} {below}"] = subcommand
    return found


def command(text: str) -> str:
    """Return the anchor of a command, which may have arguments and options: `weft train --resume RUN`."""
    words = text.split()
    name = next((name for length in (3, 2) if (name := " ".join(words[:length])) in commands()), None)
    if name is None:
        raise LookupError(f"{text}: no such command")
    options = {option for param in commands()[name].params for option in (*param.opts, *param.secondary_opts)}
    for word in words:
        if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in {*options, "--help", "-h"}:
            raise LookupError(f"{text}: {name} has no option {word}")
    return slug(name)
