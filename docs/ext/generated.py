"""Parts of pages that are made from weft itself: its commands, its settings, its functions, its routes."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

import weft
from ext import references
from ext.pages import ROOT
from weft.api.explain import Explain
from weft.config import Config, tag_of
from weft.decode.config import Beam, Sampling
from weft.figures.picture import Picture
from weft.serve.app import make_routes
from weft.serve.config import Limits, Serving
from weft.serve.library import Library
from weft.serve.page import routes
from weft.serve.server import Metrics

Rows = Iterator[list[str]]
CLASSES: tuple[type, ...] = (weft.Run, Explain, Picture)  # what functions and methods give back
OPTIONS: tuple[type[Config], ...] = (Sampling, Beam)  # what `weft.sampling` and `weft.beam` take


def table(header: list[str], rows: Rows) -> str:
    """A Markdown table, or nothing where there are no rows."""
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    head = [" | ".join(header), " | ".join("---" for _ in header)]
    return "\n".join(f"| {line} |" for line in [*head, *lines]) + "\n" if lines else ""


# ---- commands


def commands() -> str:
    """Every command: what it does, an example, its arguments and options."""
    parts, panel = [], ""
    for name, command in references.commands().items():
        if command.rich_help_panel and command.rich_help_panel != panel:
            panel = command.rich_help_panel
            parts.append(f"## {panel}\n")
        parts.append(f"({name.replace(' ', '-')})=\n### `{name}`\n")
        context = typer.Context(command, info_name=name)
        params = [param for param in command.get_params(context) if param.name != "help"]
        usage = [piece for param in params for piece in param.get_usage_pieces(context)]
        if not hasattr(command, "commands"):
            parts.append(f"```text\n{' '.join([name, '[OPTIONS]', *usage])}\n```\n")
        parts.append("\n".join(_help(command.help or "")))
        arguments = [param for param in params if param.param_type_name == "argument"]
        parts.append(table(["argument", ""], ([f"`{each.metavar}`", _prose(each.help or "")] for each in arguments)))
        groups = dict.fromkeys(each.rich_help_panel for each in params if each not in arguments)
        for group in groups:
            options = [each for each in params if each not in arguments and each.rich_help_panel == group]
            parts.append(table([group.lower() if isinstance(group, str) else "option", ""], map(_option, options)))
    return "\n".join(parts)


def _help(text: str) -> Iterator[str]:
    """The paragraphs of a command's help; lines that begin with $ are an example."""
    for example, paragraphs in _grouped(text.split("\n\n")):
        if example:
            yield "```sh\n" + "\n".join(line.strip().removeprefix("$ ") for line in paragraphs) + "\n```\n"
        else:
            yield "\n\n".join(map(_prose, paragraphs)) + "\n"


def _grouped(paragraphs: list[str]) -> list[tuple[bool, list[str]]]:
    """Paragraphs in a row that are examples, or that are not."""
    found: list[tuple[bool, list[str]]] = []
    for paragraph in paragraphs:
        example = paragraph.startswith(("$ ", "  "))
        if not found or found[-1][0] != example:
            found.append((example, []))
        found[-1][1].append(paragraph)
    return found


def _option(option: Any) -> list[str]:
    first = f"{option.opts[0]} {option.metavar or ''}".rstrip()
    names = ", ".join(f"`{each}`" for each in (first, *option.opts[1:], *option.secondary_opts))
    default = option.default.value if isinstance(option.default, Enum) else option.default
    shown = default if option.show_default and default not in (None, False, (), "", ...) else None
    return [names, _prose(option.help or "") + ("" if shown is None else f" Default: `{shown}`.")]


def _prose(text: str) -> str:
    """A sentence of a help or a docstring as Markdown: options are code, and what Markdown would take is escaped."""
    text = re.sub(r"(?<![\w`-])(--\w[\w-]*)(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"`\1`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<>*\[\]{}$_])", r"\\\1", part) for part in parts)


# ---- settings


def settings() -> str:
    """Every table of a recipe and every variant of it, with all keys: type, default and meaning."""
    parts = []
    for name, kinds in references.tables().items():
        if references.first(name) != name:
            continue
        parts.append(f"({references.anchor(name)})=\n## {f'`{name}`' if name else 'The recipe'}\n")
        for kind in kinds:
            if tag_of(kind) and len(kinds) > 1:
                parts.append(f'({references.anchor(name, kind)})=\n### `{name}.kind = "{tag_of(kind)}"`\n')
            parts.append(docstring(kind) + "\n")
            keys = ((key, its) for key, its in kind.model_fields.items() if key != "kind")
            parts.append(table(KEYS, (_key(name, key, its) for key, its in keys)))
    return "\n".join(parts)


KEYS = ["key", "type", "default", "meaning"]


def _key(inside: str, name: str, its: FieldInfo) -> list[str]:
    key = f"{inside}.{name}".lstrip(".")
    return [f"`{name}`", _type(key, its), _default(its), _prose(its.description or about(key))]


def about(key: str) -> str:
    """What a table holds, for the key that names it: the first sentence of its only type."""
    kinds = references.tables().get(key, [])
    return (kinds[0].__doc__ or "").partition(".")[0] + "." if len(kinds) == 1 else ""


def _type(key: str, its: FieldInfo) -> str:
    if key in references.tables():
        shown = f"[`{references.first(key)}`](#{references.anchor(references.first(key))})"
        return f"a list of {shown}" if get_origin(its.annotation) is tuple else shown
    return " or ".join(dict.fromkeys(_words(its.annotation)))


PLAIN = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}


def _words(annotation: Any) -> Iterator[str]:
    """A type in words: one for each of its alternatives."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(inner[0])
    elif origin is Literal:
        yield from (f"`{value}`" for value in inner)
    elif origin is tuple:
        count = "a list of " if inner[-1] is Ellipsis else f"{len(inner)} × "
        yield count + next(_words(inner[0]))
    elif origin is dict or origin is Mapping:
        yield "a table"
    elif inner:
        yield from (word for each in inner for word in _words(each))
    elif annotation is not NoneType:
        yield PLAIN.get(annotation) or f"`{annotation.__name__}`"


def _default(its: FieldInfo) -> str:
    value = its.get_default(call_default_factory=True)
    if its.is_required():
        return "required"
    if isinstance(value, Config):
        return f"`{tag_of(value.__class__)}`" if tag_of(value.__class__) else ""
    return "" if value is None or value == () else f"`{json.dumps(value, ensure_ascii=False)}`"


# ---- Python


def python() -> str:
    """The functions of `weft`, then the classes that they lead to, from their docstrings."""
    functions = [getattr(weft, name) for name in weft.__all__ if name != "__version__"]
    parts = [
        "## Functions\n",
        *(_function(each, f"weft.{each.__name__}") for each in functions if not inspect.isclass(each)),
    ]
    for kind in CLASSES:
        parts.append(f"## {kind.__name__}\n\n{docstring(kind)}\n\n{_source(kind)}\n")
        for name, member in members(kind):
            parts.append(_function(member, f"{kind.__name__}.{name}"))
    for options in OPTIONS:
        parts.append(f"## {options.__name__}\n\n{docstring(options)}\n\n{_source(options)}\n")
        parts.append(table(KEYS[:3], (_key("", name, its)[:3] for name, its in options.model_fields.items())))
    return "\n".join(parts)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of weft defines, its bases included, in their order."""
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        member = inspect.getattr_static(kind, name)
        member = getattr(member, "fget", None) or getattr(member, "func", member)
        member = inspect.unwrap(getattr(member, "__func__", member))
        ours = getattr(member, "__module__", "") or ""
        if not name.startswith("_") and inspect.isfunction(member) and ours.startswith("weft."):
            yield name, inspect.getattr_static(kind, name)


def _function(member: Any, name: str) -> str:
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    directive = "function" if function is None else "attribute"
    function = inspect.unwrap(function or getattr(member, "__func__", member))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    given = [each for each in [*tree.args.posonlyargs, *tree.args.args] if each.arg not in ("self", "cls")]
    shown = ast.unparse(ast.arguments(**{**vars(tree.args), "posonlyargs": [], "args": given}))
    # what is given back, by its name alone
    returns = re.sub(r"'|\b\w+\.", "", f" -> {ast.unparse(tree.returns)}") if tree.returns else ""
    signature = f"{name}({shown}){returns}" if directive == "function" else name
    return f"````{{py:{directive}}} {signature}\n\n{docstring(function)}\n\n{_source(function)}\n````\n"


def _source(thing: Any) -> str:
    file = Path(inspect.getsourcefile(thing) or "").relative_to(ROOT / "src").as_posix()
    return f"{{src}}`{file}:{thing.__qualname__}`"


def docstring(thing: Any) -> str:
    """A docstring as Markdown: paragraphs, and what is indented as it is."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else _prose(each) for each in paragraphs)


# ---- HTTP


def http() -> str:
    """Every route of `weft serve`, with the parameters and fields of its request."""
    library = Library([str(ROOT / "nothing")], None, Limits(), may_be_empty=True)
    parts = []
    for route in routes(make_routes(library, Serving(), Metrics(library)).openapi()):
        parts.append(f"## `{route['method']} {route['path']}`\n\n{_prose(route['about'])}\n")
        fields = route["fields"]
        ignored = [name for name, words in fields if words in ("Ignored.", "Refused: weft's models have none.")]
        parts.append(table(["field", ""], ([f"`{n}`", _prose(words)] for n, words in fields if n not in ignored)))
        if ignored:
            parts.append(f"Without effect, or refused: {', '.join(f'`{name}`' for name in ignored)}.\n")
    return "\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings, "python": python, "http": http}
