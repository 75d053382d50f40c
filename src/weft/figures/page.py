"""A page of pictures that stands alone: style, scripts and data are inside, and it asks the network for nothing."""

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

from weft.figures.tables import Table
from weft.storage.untrusted import printable

STYLES = ("page.css", "explain.css")
IMPORTED = re.compile(r'from "\./([\w.]+)"')


class Section(NamedTuple):
    """A part of a page: `html` is taken as it is; these `modules` of web/ draw what is mounted in it."""

    title: str
    about: str
    html: str
    modules: tuple[str, ...] = ()


def page(
    title: str, sections: Sequence[Section], *, summary: str = "", frame: bool = False, styles: Sequence[str] = STYLES
) -> str:
    """The whole page; as a `frame`, one that stands in a notebook beside other things. `styles` are files of web/."""
    modules = list(dict.fromkeys(name for section in sections for name in section.modules))
    text = template("page.html").render(
        title=title,
        summary=summary,
        style=Markup("".join(map(web_file, styles))),
        sections=[(f"s{number}", section) for number, section in enumerate(sections)],
        imports=_import_map(modules) if modules else "",
        loader=Markup(web_file("standalone.js")),
    )
    return template("frame.html").render(page=printable(text), title=title) if frame else printable(text)


def part(macro: str, /, *values: Any, **options: Any) -> Markup:
    """A part of a page: a macro of web/parts.html, such as cards, facts, command, notes, texts, lead or fold."""
    return Markup(getattr(template("parts.html").module, macro)(*values, **options))


def html_table(table: Table, **options: Any) -> Markup:
    """A table as a part of a page; a wide one scrolls by itself. The options are those of its macro."""
    return part("table", table, **options)


def html_tables(tables: Sequence[Table]) -> Markup:
    """Several, one below another."""
    return Markup("").join(map(html_table, tables))


def html_charts(charts: Sequence[str], kind: str = "") -> Markup:
    """Charts side by side, or one below another on a narrow page; nothing where there are none."""
    drawn = Markup("".join(charts))
    return Markup('<div class="charts {}">{}</div>').format(kind, drawn) if drawn else drawn


def mounted(module: str, value: Any, fallback: str = "") -> Markup:
    """A place where a module of web/ draws a value; `fallback`, HTML, stands there where no script runs."""
    return Markup('<div data-module="{}">{}{}</div>').format(module, data("data", value), Markup(fallback))


def _import_map(names: Sequence[str]) -> Markup:
    """These modules and all that they import, as an import map: a page that stands alone has them inside."""
    imports: dict[str, str] = {}
    left = list(names)
    while left:
        name = left.pop()
        if f"weft/{name}" in imports:
            continue
        left += IMPORTED.findall(web_file(name))
        text = IMPORTED.sub(r'from "weft/\1"', web_file(name))
        imports[f"weft/{name}"] = "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
    return Markup(json.dumps({"imports": imports}))


def data(name: str, value: Any) -> Markup:
    """A script element that holds a value as JSON, for the scripts of the page; `name` is its class."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup('<script type="application/json" class="{}">{}</script>').format(name, Markup(text))


@cache
def template(name: str) -> Template:
    """A template of web/; what it is given is escaped."""
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(web_file(name))


def web_file(name: str) -> str:
    """A file of web/, as text."""
    return web_files()[name]


@cache
def web_files() -> dict[str, str]:
    """All files of web/, by name."""
    return {
        each.name: each.read_text("utf-8") for each in (resources.files("weft") / "web").iterdir() if each.is_file()
    }


def as_json(value: Any) -> Any:
    """A view's values: arrays as lists, what is not finite as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
