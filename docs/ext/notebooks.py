"""Notebooks as pages: run when the site is built, and shown with what they printed and drew.

They are committed without outputs. One that hasn't changed since it was run is not run again: what came out is kept in
.executed/notebooks/ of the site, under the hash of its code.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from nbclient import NotebookClient
from sphinx.application import Sphinx

SOURCES = Path(__file__).parents[2] / "src"
MAX_CELL_SECONDS = 600
OUTPUT = "{code-block} text\n:class: output\n"


class NotebookParser(MystParser):
    """Reads a notebook as the MyST page that it would be."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        source, kept = Path(document["source"]), Path(document.settings.env.config.executed) / "notebooks"
        super().parse(markdown(executed(inputstring, kept, source.stem), source.name), document)


def executed(source: str, kept: Path, name: str) -> Any:
    """A notebook with its outputs, from the last time if its code is the same."""
    notebook = nbformat.reads(source, as_version=4)
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    place = kept / f"{name}-{hashlib.sha256(code.encode()).hexdigest()[:16]}.ipynb"
    if place.is_file():
        outputs = [cell.outputs for cell in nbformat.read(place, as_version=4).cells if cell.cell_type == "code"]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = outputs.pop(0)
        return notebook
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=MAX_CELL_SECONDS, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    kept.mkdir(parents=True, exist_ok=True)
    for earlier in kept.glob(f"{name}-*.ipynb"):
        earlier.unlink()
    nbformat.write(notebook, place)
    return notebook


def markdown(notebook: Any, file: str) -> str:
    """The notebook as MyST: its text, its code, and below that what came out."""
    parts: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts += [_fenced("python", cell.source), *_shown(cell.outputs)]
    return "\n\n".join([*parts, f"{{download}}`The notebook itself <{file}>`, without its outputs."])


def _shown(outputs: list[Any]) -> Iterator[str]:
    printed = ""
    for output in outputs:
        if output.output_type == "stream":
            printed += output.text
            continue
        if printed:
            yield _fenced(OUTPUT, printed)
            printed = ""
        data = output.get("data", {})
        if "text/html" in data:
            yield _fenced("{raw} html", data["text/html"])
        elif "image/png" in data:
            yield _fenced("{raw} html", f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">')
        elif "text/plain" in data:
            yield _fenced(OUTPUT, data["text/plain"])
    if printed:
        yield _fenced(OUTPUT, printed)


def _fenced(kind: str, text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{kind}\n{text.rstrip()}\n{fence}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("ext.site")  # which says where results are kept
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
