"""Parts of the reference pages, as Markdown: commands, settings, functions and routes, read from weft itself."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

import weft
from ext import references
from ext.pages import GENERATED, ROOT
from weft.api.explain import Explain
from weft.config import Config, tag_of
from weft.decode.config import Beam, Sampling
from weft.figures.picture import Picture
from weft.serve.app import make_routes
from weft.serve.config import Limits, Serving
from weft.serve.library import Library
from weft.serve.page import routes
from weft.serve.server import Metrics

CLASSES: tuple[type, ...] = (weft.Run, Explain, Picture)  # returned by functions and methods
OPTIONS: tuple[type[Config], ...] = (Sampling, Beam)  # the arguments of `weft.sampling` and `weft.beam`
SETTING_COLUMNS = ["key", "type", "default", "meaning"]
TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}
WITHOUT_EFFECT = ("Ignored.", "Refused.")


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, or nothing if there are no rows."""
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    head = [" | ".join(header), " | ".join("---" for _ in header)]
    return "\n".join(f"| {line} |" for line in [*head, *lines]) + "\n" if lines else ""


def prose(text: str) -> str:
    """Return a sentence of a help text or docstring as Markdown: options as code, special characters escaped."""
    text = re.sub(r"(?<![\w`-])(--\w[\w-]*)(?![^`]*`(?:[^`]*`[^`]*`)*[^`]*$)", r"`\1`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<>*\[\]{}$_])", r"\\\1", part) for part in parts)


# ---- commands


def commands() -> str:
    """Return every command: its help, an example, its arguments and options."""
    parts, panel = [], ""
    for name, command in references.commands().items():
        if command.rich_help_panel and command.rich_help_panel != panel:
            panel = command.rich_help_panel
            parts.append(f"## {panel}\n")
        parts.append(f"### `{name}`\n")
        context = typer.Context(command, info_name=name)
        params = [param for param in command.get_params(context) if param.name != "help"]
        usage = [piece for param in params for piece in param.get_usage_pieces(context)]
        if not hasattr(command, "commands"):
            parts.append(f"```text\n{' '.join([name, '[OPTIONS]', *usage])}\n```\n")
        for is_example, paragraphs in groupby(
            (command.help or "").split("\n\n"), lambda text: text.startswith(("$ ", "  "))
        ):
            if is_example:
                lines = [line.strip().removeprefix("$ ") for line in paragraphs]
                parts.append("\n".join(["```bash", *lines, "```\n"]))
            else:
                parts.append("\n\n".join(map(prose, paragraphs)) + "\n")
        arguments = [param for param in params if param.param_type_name == "argument"]
        parts.append(table(["argument", ""], ([f"`{param.metavar}`", prose(param.help or "")] for param in arguments)))
        for group in dict.fromkeys(param.rich_help_panel for param in params if param not in arguments):
            options = [param for param in params if param not in arguments and param.rich_help_panel == group]
            parts.append(table([group.lower() if isinstance(group, str) else "option", ""], map(_option, options)))
    return "\n".join(filter(None, parts))


def _option(option: Any) -> list[str]:
    first = f"{option.opts[0]} {option.metavar or ''}".rstrip()
    names = ", ".join(f"`{name}`" for name in (first, *option.opts[1:], *option.secondary_opts))
    default = option.default.value if isinstance(option.default, Enum) else option.default
    shown = default if option.show_default and default not in (None, False, (), "", ...) else None
    return [names, prose(option.help or "") + ("" if shown is None else f" Default: `{shown}`.")]


# ---- settings


def settings() -> str:
    """Return every table of a recipe and its variants, with all keys: type, default and meaning."""
    parts = []
    for name, variants in references.tables().items():
        if references.described_at(name) != name:
            continue
        parts.append(f"## {references.heading(name)}\n")
        for variant in variants:
            if tag_of(variant) and len(variants) > 1:
                parts.append(f"### {references.heading(name, variant)}\n")
            parts.append(docstring(variant) + "\n")
            fields = ((key, field) for key, field in variant.model_fields.items() if key != "kind")
            parts.append(table(SETTING_COLUMNS, (_setting(name, key, field) for key, field in fields)))
    return "\n".join(filter(None, parts))


def _setting(inside: str, name: str, field: FieldInfo) -> list[str]:
    key = f"{inside}.{name}".lstrip(".")
    return [f"`{name}`", _type(key, field), _default(field), prose(field.description or about_table(key))]


def about_table(key: str) -> str:
    """Return the first sentence about a table that has only one config type."""
    variants = references.tables().get(key, [])
    return (variants[0].__doc__ or "").partition(".")[0] + "." if len(variants) == 1 else ""


def _type(key: str, field: FieldInfo) -> str:
    if key in references.tables():
        place = references.described_at(key)
        link = f"[`{place}`](#{references.slug(references.heading(place))})"
        return f"a list of {link}" if get_origin(field.annotation) is tuple else link
    return " or ".join(dict.fromkeys(_alternatives(field.annotation)))


def _alternatives(annotation: Any) -> Iterator[str]:
    """Yield the alternatives of a type, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _alternatives(inner[0])
    elif origin is Literal:
        yield from (f"`{value}`" for value in inner)
    elif origin is tuple:
        count = "a list of " if inner[-1] is Ellipsis else f"{len(inner)} × "
        yield count + next(_alternatives(inner[0]))
    elif origin is dict or origin is Mapping:
        yield "a table"
    elif inner:
        yield from (word for part in inner for word in _alternatives(part))
    elif annotation is not NoneType:
        yield TYPE_NAMES.get(annotation) or f"`{annotation.__name__}`"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(value, Config):
        return f"`{tag_of(value.__class__)}`" if tag_of(value.__class__) else ""
    return "" if value is None or value == () else f"`{json.dumps(value, ensure_ascii=False)}`"


# ---- Python


def python() -> str:
    """Return the functions of `weft`, then the classes that they return, from their docstrings."""
    functions = [getattr(weft, name) for name in weft.__all__ if name != "__version__"]
    parts = ["## Functions\n"]
    parts += [_function(each, f"weft.{each.__name__}") for each in functions if not inspect.isclass(each)]
    for kind in CLASSES:
        parts.append(f"## {kind.__name__}\n\n{docstring(kind)}\n\n{_source(kind)}\n")
        parts += [_function(member, f"{kind.__name__}.{name}") for name, member in members(kind)]
    for options in OPTIONS:
        parts.append(f"## {options.__name__}\n\n{docstring(options)}\n\n{_source(options)}\n")
        parts.append(table(SETTING_COLUMNS[:3], (_setting("", *item)[:3] for item in options.model_fields.items())))
    return "\n".join(parts)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, those of its bases in weft included, in their order."""
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        member = inspect.getattr_static(kind, name)
        function = _underlying(member)
        module = getattr(function, "__module__", "") or ""
        if not name.startswith("_") and inspect.isfunction(function) and module.startswith("weft."):
            yield name, member


def _underlying(member: Any) -> Any:
    """Return the function behind a method, a property or a cached property."""
    for attribute in ("fget", "func", "__func__"):
        member = getattr(member, attribute, None) or member
    return inspect.unwrap(member)


def _function(member: Any, name: str) -> str:
    function = _underlying(member)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    positional = [each for each in [*tree.args.posonlyargs, *tree.args.args] if each.arg not in ("self", "cls")]
    arguments = ast.unparse(ast.arguments(**{**vars(tree.args), "posonlyargs": [], "args": positional}))
    returns = re.sub(r"'|\b\w+\.", "", ast.unparse(tree.returns)) if tree.returns else ""  # without modules
    is_property = getattr(member, "fget", None) or getattr(member, "func", None)
    signature = f"{name}: {returns}" if is_property else f"{name}({arguments}) -> {returns}"
    return f"### `{name}`\n\n```py\n{signature}\n```\n\n{docstring(function)}\n\n{_source(function)}\n"


def _source(thing: Any) -> str:
    file = Path(inspect.getsourcefile(thing) or "").relative_to(ROOT / "src").as_posix()
    return f"Source: `{file}:{thing.__qualname__}`"


def docstring(thing: Any) -> str:
    """Return a docstring as Markdown; indented paragraphs stay as they are."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else prose(each) for each in paragraphs)


# ---- HTTP


def http() -> str:
    """Return every route of `weft serve`, with the parameters and fields of its request."""
    library = Library([str(ROOT / "nothing")], None, Limits(), may_be_empty=True)
    parts = []
    for route in routes(make_routes(library, Serving(), Metrics(library)).openapi()):
        parts.append(f"## `{route['method']} {route['path']}`\n\n{prose(route['about'])}\n")
        fields = [(name, words) for name, words in route["fields"] if words not in WITHOUT_EFFECT]
        parts.append(table(["field", ""], ([f"`{name}`", prose(words)] for name, words in fields)))
        if ignored := [f"`{name}`" for name, words in route["fields"] if words in WITHOUT_EFFECT]:
            parts.append(f"Without effect, or refused: {', '.join(ignored)}.\n")
    return "\n".join(filter(None, parts))


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings, "python": python, "http": http}


def generated(text: str) -> str:
    """Return a page with its generated parts as they are now."""
    return GENERATED.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text)
