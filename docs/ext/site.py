"""Build the documentation as a site that needs neither a network nor a server: `python -m ext.site DIR`.

Pages of docs/ and its notebooks become HTML pages, and so does every file of the repository that they link. No block is
run: outputs and figures are those recorded in the repository, and what is not recorded yet is left out. The navigation
follows the links of docs/README.md and of the README.md of each folder. Links, anchors and references that lead nowhere
are listed, and make the command fail.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html import escape, unescape
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from matplotlib import rc_context
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

from ext import references
from ext.generated import generated
from ext.pages import COMMENT, DOCS, FIGURES, ROOT, fence_around, page_names, page_path
from weft import __version__

STATIC = DOCS / "static"
MATH = re.compile(r"(\$\$?)(?=\S)([^$]+?)\1")
SEGMENTS = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C", Outline.CLOSEPOLY: "Z"}
COMPACT: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
LEVELS = {"h2": 2, "h3": 3}  # headings in a page's own table of contents


@dataclass(eq=False)
class Page:
    """A page of the site: `name` is its address without .html, `file` its source."""

    name: str
    file: Path
    title: str = ""
    html: str = ""
    headings: list[tuple[int, str, str]] = field(default_factory=list)  # level, HTML, anchor
    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, Path, str]] = field(default_factory=list)  # as written, file, anchor


class Site:
    """All pages by their source files, and what is wrong with them."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.docs = root, root / "docs"
        self.pages: dict[Path, Page] = {}
        self.figures: set[Path] = set()
        self.problems: list[str] = []
        self._parser = MarkdownIt("commonmark").enable("table")
        self._parser.inline.ruler.push("math", parse_math)
        for name in RULES:
            self._parser.add_render_rule(name, RULES[name])
        for name in page_names(self.docs):
            self.add(page_path(name, self.docs))
        while waiting := [page for page in self.pages.values() if not page.html]:
            for page in waiting:  # which may link further files
                self.render(page)
        self._check_anchors()

    def add(self, file: Path) -> Page:
        """Return the page of a file, a new one if the site has none."""
        if file not in self.pages:
            inside = file.is_relative_to(self.docs) and file.suffix in (".md", ".ipynb")
            name = (
                file.relative_to(self.docs).with_suffix("") if inside else Path("source", file.relative_to(self.root))
            )
            self.pages[file] = Page((name.with_name("index") if name.name == "README" else name).as_posix(), file)
        return self.pages[file]

    def render(self, page: Page) -> None:
        """Fill in the title, the HTML and the links of a page."""
        text = page.file.read_text(encoding="utf-8")
        if page.file.suffix not in (".md", ".ipynb"):
            page.title = page.name.removeprefix("source/")
            page.html = f'<h1>{page.title}</h1><div class="source">{highlighted(text, page.file.name)}</div>'
            page.anchors = set(re.findall(r'id="(L-\d+)"', page.html))
            return
        text = notebook_markdown(json.loads(text), page.file.name) if page.file.suffix == ".ipynb" else generated(text)
        page.html = self._parser.render(text, {"site": self, "page": page, "needs": "", "depth": 0})
        page.title = page.title or page.name

    def link(self, page: Page, href: str) -> str:
        """Return the address of a link on the site."""
        path, _, anchor = href.partition("#")
        if re.match(r"[a-z]+:", href):
            return href
        file = (page.file.parent / unquote(path)).resolve() if path else page.file
        file = file / "README.md" if file.is_dir() else file
        if file.is_relative_to(self.docs / FIGURES) and not file.is_file():
            return ""  # not recorded yet
        if not file.is_file() or not file.is_relative_to(self.root):
            self.problems.append(f"{page.file.relative_to(self.root)}: {href}: no such file")
            return href
        if file.suffix in (".png", ".svg", ".webp"):
            self.figures.add(file)
            return relpath(self._copied(file), Path(page.name).parent)
        page.links.append((href, file, unquote(anchor)))
        return self.address(page, self.add(file)) + (f"#{anchor}" if anchor else "")

    def _copied(self, file: Path) -> Path:
        """Return where a figure or a notebook is copied to, relative to the site."""
        return file.relative_to(self.docs if file.is_relative_to(self.docs) else self.root)

    def address(self, page: Page, target: Page) -> str:
        return relpath(f"{target.name}.html", Path(page.name).parent)

    def refer(self, page: Page, text: str, find: Any = references.find) -> str | None:
        """Return the address of what inline code refers to, or None."""
        try:
            found = find(text)
        except LookupError as error:
            self.problems.append(f"{page.file.relative_to(self.root)}: {error.args[0]}")
            return None
        if found is None:
            return None
        file, anchor = self.root / found[0], found[1]
        page.links.append((text, file, anchor))
        return self.address(page, self.add(file)) + (f"#{anchor}" if anchor else "")

    def _check_anchors(self) -> None:
        for page in self.pages.values():
            for href, file, anchor in page.links:
                if anchor and anchor not in self.pages[file].anchors:
                    self.problems.append(f"{page.file.relative_to(self.root)}: {href}: no such section")

    def navigation(self) -> list[tuple[str, list[tuple[Page, list[Page]]]]]:
        """Return the sections of docs/README.md, each with its pages and the pages below them."""
        front = self.pages[self.docs / "README.md"]
        sections: list[tuple[str, list[tuple[Page, list[Page]]]]] = []
        listed = {front.name}
        for heading, files in linked_by_section(front):
            entries = []
            for target in [self.pages[file] for file in files if self.pages[file].name not in listed]:
                folder = target.file.parent if target.file.name == "README.md" else None
                below = [
                    self.pages[file] for _, file, _ in target.links if file.parent == folder and file != target.file
                ]
                entries.append((target, list({each.name: each for each in below}.values())))
                listed |= {target.name, *(each.name for each in below)}
            sections.append((heading, entries))
        for page in self.pages.values():
            if page.name not in listed and not page.name.startswith("source/"):
                self.problems.append(f"{page.file.relative_to(self.root)}: linked by no README.md of docs/")
        return sections

    def write(self, out: Path) -> None:
        """Write all pages, figures, and the index that the search reads; the front page comes last."""
        environment = Environment(
            loader=FileSystemLoader(STATIC), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        template, navigation = environment.get_template("page.html"), self.navigation()
        order = [page for _, entries in navigation for entry, below in entries for page in (entry, *below)]
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for name in ("site.css", "site.js"):
            shutil.copyfile(STATIC / name, out / name)
        index = json.dumps([entry for page in self.pages.values() for entry in search_entries(page)], **COMPACT)
        (out / "search.js").write_text(f"window.searchIndex={index};\n", encoding="utf-8")
        notebooks = [page.file for page in self.pages.values() if page.file.suffix == ".ipynb"]
        for file in [*self.figures, *notebooks]:
            copy = out / self._copied(file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        for page in sorted(self.pages.values(), key=lambda page: page.name == "index"):
            position = order.index(page) if page in order else None
            html = template.render(
                page=page,
                navigation=navigation,
                address=lambda target, page=page: self.address(page, target),
                root=relpath(".", Path(page.name).parent),
                previous=order[position - 1] if position else None,
                following=order[position + 1] if position is not None and position + 1 < len(order) else None,
                version=__version__,
            )
            path = out / f"{page.name}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html, encoding="utf-8")


def linked_by_section(page: Page) -> Iterator[tuple[str, list[Path]]]:
    """Yield each second-level heading of a page with the files below its folder that the section links."""
    sections = re.split(r'<h2 id="[^"]*">(.*?)<a ', page.html)
    addresses = {href: file for href, file, _ in page.links}
    for heading, html in zip(sections[1::2], sections[2::2], strict=True):
        linked = [addresses.get(unescape(href)) for href in re.findall(r'data-source="([^"]*)"', html)]
        yield (
            unescape(heading),
            list(dict.fromkeys(file for file in linked if file and page.file.parent in file.parents)),
        )


def search_entries(page: Page) -> Iterator[list[str]]:
    """Yield the address, the page title, the heading and the text of each section; of a source file only its name."""
    if page.name.startswith("source/") and page.file.suffix != ".md":
        yield [f"{page.name}.html", page.title, "", ""]
        return
    for part in re.split(r"(?=<h[23] id=)", page.html):
        heading = re.match(r'<h[23] id="([^"]*)">(.*?)<a ', part)
        anchor, title = (f"#{heading[1]}", plain(heading[2])) if heading else ("", "")
        text = plain(re.sub(r"<h\d.*?</h\d>", "", part))
        yield [f"{page.name}.html{anchor}", page.title, title, text]


def plain(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


# ---- from Markdown to HTML


def parse_math(state: StateInline, silent: bool) -> bool:
    """Parse a formula between dollar signs."""
    match = MATH.match(state.src, state.pos)
    if match is None:
        return False
    if not silent:
        token = state.push("math", "", 0)
        token.content, token.markup = match[2], match[1]
    state.pos = match.end()
    return True


def render_math(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    return formula(tokens[index].content, tokens[index].markup == "$$")


@cache
def formula(tex: str, display: bool) -> str:
    """Return a formula as an SVG element that has the colour and the size of the text around it."""
    with rc_context({"mathtext.fontset": "stix"}):
        outline = TextPath((0, 0), f"${tex}$".replace(r"\text", r"\mathrm"), size=100)
    box, parts = outline.get_extents(), []
    for points, code in outline.iter_segments():
        coordinates = [f"{y if i % 2 == 0 else -y:.0f}" for i, y in enumerate(points)]
        parts.append(SEGMENTS[code] + ("" if code == Outline.CLOSEPOLY else " ".join(coordinates)))
    style = f"height:{box.height / 100:.3f}em;vertical-align:{box.y0 / 100:.3f}em"
    frame = f"{box.x0:.0f} {-box.y1:.0f} {box.width:.0f} {box.height:.0f}"
    svg = f'<svg class="math" role="img" aria-label="{escape(tex)}" viewBox="{frame}" style="{style}">'
    svg += f'<path d="{"".join(parts)}"/></svg>'
    return f'<span class="display">{svg}</span>' if display else svg


def highlighted(code: str, name: str) -> str:
    """Return a source file as HTML, with an anchor for each line."""
    style = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    try:
        return str(highlight(code, get_lexer_for_filename(name), style))
    except ClassNotFound:
        return str(highlight(code, TextLexer(), style))


def render_fence(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    language = tokens[index].info.strip() or "text"
    try:
        lexer = get_lexer_by_name("text" if language == "output" else language, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer()
    kind = "output" if language == "output" else "commands" if language in ("sh", "python") else "code"
    html = highlight(tokens[index].content, lexer, HtmlFormatter(cssclass=f"highlight {kind}"))
    needs, env["needs"] = env["needs"], ""
    return str(html) + (f'<p class="needs">Not run here: needs {escape(needs)}.</p>' if needs else "")


def render_heading_open(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    page, inline = env["page"], tokens[index + 1]
    env["depth"] = 1
    html = renderer.renderInline(inline.children, options, env)
    env["depth"] = 0
    anchor = name = references.slug(inline.content)
    while anchor in page.anchors:
        anchor = f"{name}-{int(anchor[len(name) + 1 :] or 0) + 1}"
    page.anchors.add(anchor)
    if tokens[index].tag == "h1" and not page.title:
        page.title = plain(html)
    elif tokens[index].tag in LEVELS:
        page.headings.append((LEVELS[tokens[index].tag], html, anchor))
    env["depth"], env["anchor"] = 1, anchor
    return f'<{tokens[index].tag} id="{anchor}">'


def render_heading_close(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    env["depth"] = 0
    return f'<a class="anchor" href="#{env["anchor"]}" aria-label="Link to this section">#</a></{tokens[index].tag}>\n'


def render_link_open(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    href = str(tokens[index].attrs["href"])
    env["depth"] += 1
    return f'<a href="{escape(env["site"].link(env["page"], href))}" data-source="{escape(href)}">'


def render_link_close(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    env["depth"] -= 1
    return "</a>"


def render_code_inline(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    html, text = f"<code>{escape(tokens[index].content)}</code>", " ".join(tokens[index].content.split())
    address = None if env["depth"] else env["site"].refer(env["page"], text)
    return f'<a class="reference" href="{escape(address)}">{html}</a>' if address else html


def render_text(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    html = escape(tokens[index].content)
    if not (index and tokens[index - 1].type == "strong_open" and references.FACT.fullmatch(html)):
        return html
    address = env["site"].refer(env["page"], html, lambda name: (references.fact(name), ""))
    return f'<a class="fact" href="{escape(address)}">{html}</a>' if address else html


def render_image(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    source = env["site"].link(env["page"], str(tokens[index].attrs["src"]))
    return f'<img src="{escape(source)}" alt="{escape(tokens[index].content)}">' if source else ""


def render_html(renderer: Any, tokens: list[Token], index: int, options: Any, env: Any) -> str:
    content = tokens[index].content
    if (comment := COMMENT.match(content)) and comment[1].startswith("needs "):
        env["needs"] = comment[1].removeprefix("needs ")
    return "" if content.lstrip().startswith("<!--") else content


RULES: dict[str, Any] = {
    "math": render_math,
    "fence": render_fence,
    "heading_open": render_heading_open,
    "heading_close": render_heading_close,
    "link_open": render_link_open,
    "link_close": render_link_close,
    "code_inline": render_code_inline,
    "text": render_text,
    "image": render_image,
    "html_block": render_html,
    "html_inline": render_html,
    "table_open": lambda *_: '<div class="table"><table>\n',
    "table_close": lambda *_: "</table></div>\n",
}


def notebook_markdown(notebook: dict[str, Any], file: str) -> str:
    """Return a notebook as Markdown: its text, its code, and the recorded outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/svg+xml" in data:
                parts.append(f'<div class="figure">{"".join(data["image/svg+xml"]).strip()}</div>')
            elif text := "".join(output.get("text") or data.get("text/plain") or ()).rstrip():
                parts.append(f"{fence_around(text)}output\n{text}\n{fence_around(text)}")
    return "\n\n".join([*parts, f'<p><a href="{file}" download>Download this notebook</a></p>'])


def main(out: Path) -> None:
    site = Site()
    site.write(out)
    if site.problems:
        sys.exit("\n".join(sorted(set(site.problems))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
