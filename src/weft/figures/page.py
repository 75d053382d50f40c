"""A page of pictures that stands alone: style, scripts and data are inside, and it asks the network for nothing."""

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

from weft.untrusted import printable


class Section(NamedTuple):
    """A part of a page: `html` is taken as it is, and needs these `scripts` of web/."""

    title: str
    about: str
    html: str
    scripts: tuple[str, ...] = ()


def page(title: str, sections: Sequence[Section], *, summary: str = "", frame: bool = False) -> str:
    """The whole page; as a `frame`, one that stands in a notebook beside other things."""
    names = dict.fromkeys(name for section in sections for name in section.scripts)
    text = template("page.html").render(
        title=title,
        summary=summary,
        style=Markup(web_file("page.css") + web_file("explain.css")),
        sections=[(f"s{number}", section) for number, section in enumerate(sections)],
        scripts=[Markup(web_file(name)) for name in names],
    )
    text = printable(text)
    return template("frame.html").render(page=text, title=title) if frame else text


def data(name: str, value: Any) -> Markup:
    """A script element that holds a value as JSON, for the scripts of the page; `name` is its class."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup('<script type="application/json" class="{}">{}</script>').format(
        name, Markup(text.replace("<", "\\u003c"))
    )


@cache
def template(name: str) -> Template:
    """A template of web/; what it is given is escaped."""
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(web_file(name))


@cache
def web_file(name: str) -> str:
    """A file of web/, as text."""
    return (resources.files("weft") / "web" / name).read_text("utf-8")
