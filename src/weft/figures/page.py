"""Self-contained pages: style, scripts and data are inside, and nothing is loaded from a network."""

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, Template
from markupsafe import Markup

from weft.figures.tables import Table
from weft.storage.untrusted import printable

STYLES = ("page.css", "explain.css")
IMPORT = re.compile(r'from "\./(\w+\.js)"')
IMPORT_LATER = "import(`./"


class Section(NamedTuple):
    """Section of a page. `html` is inserted unescaped; the `modules` of web/ draw the mount points in it."""

    title: str
    about: str
    html: str
    modules: tuple[str, ...] = ()


def page(
    title: str, sections: Sequence[Section], *, summary: str = "", frame: bool = False, styles: Sequence[str] = STYLES
) -> str:
    """Return a page, or with `frame` an <iframe> of it for a notebook. `styles` are files of web/."""
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


@cache
def explorer_page() -> str:
    """Return the Explorer's page with its styles and modules inside."""
    modules = ["explorer.js", *(name for name in web_files() if name.startswith("view_"))]
    scripts = f'<script type="importmap">{_import_map(modules)}</script>'
    text = web_file("explorer.html").replace(
        '<script type="module" src="web/explorer.js"></script>',
        f'{scripts}\n<script type="module">import "weft/explorer.js";</script>',
    )
    text = re.sub(r'<link rel="stylesheet" href="web/([a-z]+\.css)">', lambda link: _style(link[1]), text)
    return re.sub(r'<link rel="icon".*>\n', "", text)


def _style(name: str) -> str:
    return f"<style>{web_file(name)}</style>"


def part(macro: str, /, *values: Any, **options: Any) -> Markup:
    """Render a macro of templates/parts.html, such as cards, facts, command, notes, texts, lead or fold."""
    return Markup(getattr(template("parts.html").module, macro)(*values, **options))


def html_table(table: Table, **options: Any) -> Markup:
    """Return a table as HTML; a wide one scrolls sideways. The options are those of its macro."""
    return part("table", table, **options)


def html_tables(tables: Sequence[Table]) -> Markup:
    return Markup("").join(map(html_table, tables))


def html_charts(charts: Sequence[str], kind: str = "") -> Markup:
    """Return charts side by side, or stacked on a narrow page; empty if there are none."""
    content = Markup("".join(charts))
    return Markup('<div class="charts {}">{}</div>').format(kind, content) if content else content


def mount_point(module: str, value: Any, fallback: str = "") -> Markup:
    """Return an element in which a module of web/ draws a value; without scripts the page shows `fallback`, HTML."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    element = Markup('<div data-module="{}"><script type="application/json" class="data">{}</script>{}</div>')
    return element.format(module, Markup(data), Markup(fallback))


def _import_map(names: Sequence[str]) -> Markup:
    """Return an import map that contains these modules, and all modules that they import, as data URLs."""
    imports: dict[str, str] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if f"weft/{name}" in imports:
            continue
        pending += IMPORT.findall(web_file(name))
        text = IMPORT.sub(r'from "weft/\1"', web_file(name)).replace(IMPORT_LATER, "import(`weft/")
        imports[f"weft/{name}"] = "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
    return Markup(json.dumps({"imports": imports}))


@cache
def template(name: str) -> Template:
    """Return a template; its values are escaped."""
    text = (resources.files("weft.figures") / "templates" / name).read_text("utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def web_file(name: str) -> str:
    """Return the text of a file of web/."""
    return web_files()[name]


@cache
def web_files() -> dict[str, str]:
    """Return the texts of all files of web/, by name."""
    folder = resources.files("weft") / "web"
    return {file.name: file.read_text("utf-8") for file in folder.iterdir() if file.is_file()}


def as_json(value: Any) -> Any:
    """Convert a value to JSON data: arrays become lists, dataclasses and named tuples objects, NaN and ∞ null."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and np.isfinite(value).all():
        return value.tolist()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
