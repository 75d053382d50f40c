"""The Sphinx extension: directives that run, roles that fail for what isn't there, pages of source, formulas."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.utils.math.latex2mathml import tex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from ext import pages, references
from ext.generated import GENERATED
from ext.pages import ROOT, Block, Outcome, PageError

log = logging.getLogger(__name__)
INSERT = re.compile(r"<!-- insert: (\w+) -->")


# ---- blocks


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put generated text in its place, run the page's blocks, and leave what they printed to the directives."""
    source[0] = expanded(source[0])
    page: dict[str, Any] = {"left": []}
    app.env.temp_data["weft"] = page
    try:
        blocks = pages.parse(source[0])
        if blocks:
            store = Path(app.config.executed)
            if not pages.place(docname, blocks, store).exists():
                log.info("running the commands of %s", docname)
            outcomes, page["folder"] = pages.kept(docname, blocks, store)
            app.env.note_dependency(page["folder"] / "results.json")
            page["left"] = list(zip(blocks, outcomes, strict=True))
    except PageError as error:
        log.warning("%s", error, location=(docname, error.line))


def expanded(text: str) -> str:
    """A page with the generated parts that it asks for."""
    return INSERT.sub(lambda found: GENERATED[found[1]](), text)


class Run(Directive):
    """A block of the page: what was run, and what it printed."""

    kind = "run"
    language = "sh"
    has_content = True
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {
        **dict.fromkeys(pages.FLAGS, directives.flag),
        **dict.fromkeys(pages.VALUES, directives.unchanged),
    }

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        page = env.temp_data["weft"]
        if not page["left"]:
            return []  # the page has failed, which was said
        block, outcome = page["left"].pop(0)
        assert block.kind == self.kind, f"{env.docname}: {self.kind} block at line {self.lineno} is not where it was"
        shown = [] if "hidden" in block.options else list(self.shown(block, outcome))
        for name in block.figures:
            file = os.path.relpath(page["folder"] / name, env.srcdir)
            shown.append(nodes.image(uri=f"/{file}", alt=block.options.get("alt", ""), classes=["drawn"]))
        return shown

    def shown(self, block: Block, outcome: Outcome) -> Iterator[nodes.Node]:
        yield _literal(block.body, self.language, "commands")
        if block.needs is not None:
            yield nodes.paragraph("", f"not run here: needs {block.needs}", classes=["needs"])
        lines = int(block.options["lines"]) if "lines" in block.options else None
        if outcome.output and "quiet" not in block.options:
            yield _literal(outcome.last(lines), "text", "output")


class RunPython(Run):
    kind = "run-python"
    language = "python"


class File(Run):
    """A file that the page writes, with its name above it."""

    kind = "file"
    required_arguments = 1
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {"hidden": directives.flag}

    def shown(self, block: Block, outcome: Outcome) -> Iterator[nodes.Node]:
        language = {".toml": "toml", ".py": "python", ".json": "json", ".sh": "sh"}.get(Path(block.argument).suffix)
        yield nodes.paragraph("", "", nodes.literal("", block.argument), classes=["file-name"])
        yield _literal(block.body, language or "text", "file")


def _literal(text: str, language: str, kind: str) -> nodes.literal_block:
    text = text.rstrip("\n")
    return nodes.literal_block(text, text, language=language, classes=[kind])


# ---- roles


class Link(SphinxRole):
    """A role that links what `find` finds: its text, its page and the anchor there. What isn't there is an error."""

    def __init__(self, find: Callable[[str], tuple[str, str, str]]):
        super().__init__()
        self.find = find

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            shown, page, anchor = self.find(self.text)
        except LookupError as error:
            log.warning("{%s}: %s", self.name, error, location=self.get_location())
            return [nodes.literal(self.rawtext, self.text)], []
        uri = self.env.app.builder.get_relative_uri(self.env.docname, page) + (f"#{anchor}" if anchor else "")
        inside = nodes.literal("", shown)
        return [nodes.reference(self.rawtext, "", inside, refuri=uri, internal=True, classes=[self.name])], []


def _source(text: str) -> tuple[str, str, str]:
    path, line = references.source(text)
    return f"{path}:{line}" if ":" in text else path, f"source/{path}", f"L-{line}"


ROLES: dict[str, Callable[[str], tuple[str, str, str]]] = {
    "src": _source,
    "fact": lambda text: (text, f"source/{references.fact(text)}", ""),
    "setting": lambda text: (text, "reference/settings", references.setting(text)),
    "cmd": lambda text: (text, "reference/commands", references.command(text)),
}


def _source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page with numbered lines for every file that a page links."""
    texts = [expanded(Path(app.env.doc2path(name)).read_text(encoding="utf-8")) for name in app.env.found_docs]
    files = {references.source(found[1])[0] for text in texts for found in references.SOURCE.finditer(text)}
    files |= {references.fact(found[1]) for text in texts for found in references.FACT.finditer(text)}
    style = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for file in sorted(files):
        code = highlight((ROOT / file).read_text(encoding="utf-8"), get_lexer_for_filename(file), style)
        body = f'<h1>{file}</h1><div class="source">{code}</div>'
        yield f"source/{file}", {"title": file, "body": body, "display_toc": False}, "page.html"


# ---- formulas


def _formula(self: Any, node: nodes.Element) -> None:
    """MathML, which browsers draw themselves: nothing is loaded."""
    block = isinstance(node, nodes.math_block)
    self.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def _outdated(app: Sphinx, env: Any, *_: Any) -> list[str]:
    return [name for name in env.found_docs if INSERT.search(Path(env.doc2path(name)).read_text(encoding="utf-8"))]


def setup(app: Sphinx) -> dict[str, bool]:
    for directive in (Run, RunPython, File):
        app.add_directive(directive.kind, directive)
    for name, find in ROLES.items():
        app.add_role(name, Link(find))
    app.add_html_math_renderer("mathml", inline_renderers=(_formula, None), block_renderers=(_formula, None))
    app.add_config_value("executed", str(pages.STORE), "")  # the folder that keeps what pages printed
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _outdated)
    app.connect("html-collect-pages", _source_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
