"""Record the outputs of pages, or check that the recorded ones still come.

    python -m ext.record [--jobs N]       run every page and rewrite its outputs and figures (make record-docs)
    python -m ext.record guides start/…   only these pages, or all pages of a folder

Times, rates, byte sizes, dates and temporary paths are never compared. The option `varies` of a block allows further
differences: `numbers` other numbers between the same words, `text` another text (such as one that a model generates),
and `/REGEX/` the parts that match the expression.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from pathlib import Path
from typing import Any

from ext import pages
from ext.execute import execute
from ext.generated import generated
from ext.pages import DOCS, FIGURES, GENERATED, ROOT, PageError, page_names, page_path, parse

NUMBER = r"\d[\d.,]*(?:e[+-]?\d+)?"
UNITS = r"(?:ns|µs|us|ms|s|sec|seconds?|min|minutes?|h|hours?|[kMGT]i?B|\w+/s)"
UNIVERSAL = [  # replaced in every output before it is compared
    (rf"{NUMBER}\s?{UNITS}(?![\w/])", "#"),
    (r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?|\b\d?\d:\d\d(?::\d\d)?\b", "#"),
    (r"/tmp/\S+", "#"),
    (r"(?:# ?){2,}", "# "),  # 2 min 14 s
    (r"[─━═-]{3,}", "---"),
    (r"[ \t]+", " "),
]
KINDS = {"numbers": rf"[-+−]?{NUMBER}|\b(?:inf|nan)\b", "text": r"(?s).+"}
MAX_CELL_SECONDS = 600

# A notebook's pictures are recorded as figures, which code hosts show, instead of pages that need scripts.
DRAW_FIGURES = """\
from weft.figures.picture import Picture, render

formatters = get_ipython().display_formatter.formatters
formatters["text/html"].for_type(Picture, lambda picture: None)
formatters["image/svg+xml"].for_type(Picture, lambda picture: render(picture.figure(), "svg").decode())
"""


def normalised(output: str, varies: str = "") -> str:
    """Return an output without the parts that may differ between two runs or two machines."""
    if varies.startswith("/"):
        output = re.sub(varies[1:-1], "~", output)
    for pattern, replacement in UNIVERSAL:
        output = re.sub(pattern, replacement, output)
    output = re.sub(KINDS[varies], "~", output) if varies in KINDS else output
    return "\n".join(line.strip() for line in output.splitlines())


def record(name: str, docs: Path = DOCS) -> None:
    """Run a page and rewrite what is recorded of it: outputs, generated parts and figures."""
    path, folder = page_path(name, docs), docs / FIGURES / name
    text, figures = _run_notebook(path) if path.suffix == ".ipynb" else _run_page(name, path)
    path.write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    for file, content in figures.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content, encoding="utf-8")


def check(name: str, docs: Path = DOCS) -> list[str]:
    """Run a page and return how it differs from what is recorded, one entry per difference."""
    path = page_path(name, docs)
    if path.suffix == ".ipynb":
        old, new = (list(_cell_outputs(text)) for text in (path.read_text(encoding="utf-8"), _run_notebook(path)[0]))
        return [_difference(f"{name}, cell {cell}", *pair) for (cell, *pair) in _unequal(old, new)]
    recorded = path.read_text(encoding="utf-8")
    text, figures = _run_page(name, path)
    problems = [f"{name}: {file} is not recorded" for file in figures if not (docs / FIGURES / name / file).is_file()]
    for part, new_part in zip(GENERATED.finditer(recorded), GENERATED.finditer(text), strict=True):
        if part[0] != new_part[0]:
            problems.append(_difference(f"{name}: generated part '{part[2]}'", part[0], new_part[0]))
    for block, new_block in zip(parse(recorded), parse(text), strict=True):
        before, now = block.recorded or "", new_block.recorded or ""
        if normalised(before, block.options.get("varies", "")) != normalised(now, block.options.get("varies", "")):
            problems.append(_difference(f"{name}, line {block.line}", before, now))
    return problems


def _run_page(name: str, path: Path) -> tuple[str, dict[str, str]]:
    """Return the page with the outputs of a new run, and the figures that it wrote."""
    text = generated(path.read_text(encoding="utf-8"))
    blocks, files = parse(text), pages.figures_of(name, text)
    try:
        outputs, contents = execute(blocks, files)
    except PageError as error:
        raise PageError(error.line, f"{name}, line {error.line}: {error}") from None
    shown = [_refreshed(block.recorded, block.shown(output)) for block, output in zip(blocks, outputs, strict=True)]
    return pages.with_outputs(text, blocks, shown), {
        file: compact_svg(content.decode()) for file, content in zip(files, contents, strict=True)
    }


def _refreshed(recorded: str | None, output: str) -> str:
    """Return the recorded output if the new one differs only in times and the like, so that pages change rarely."""
    return output if recorded is None or normalised(recorded) != normalised(output) else recorded


def _difference(where: str, before: str, now: str) -> str:
    lines = unified_diff(before.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=1)
    return "\n".join([f"{where}: the recorded output no longer comes", *lines])


def compact_svg(text: str) -> str:
    """Return a figure without metadata and comments, with coordinates rounded to hundredths, or to four digits."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"-?\d+\.\d{3,}(?:e-?\d+)?", lambda number: _rounded(float(number[0])), text)
    return re.sub(r"\s*\n\s*", "\n", text).strip() + "\n"


def _rounded(value: float) -> str:
    short = f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.4g}"
    return short.rstrip("0").rstrip(".") if "." in short and "e" not in short else short


# ---- notebooks


def _run_notebook(path: Path) -> tuple[str, dict[str, str]]:
    """Return a notebook with the outputs of a new run, as text."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    setup = nbformat.v4.new_code_cell(DRAW_FIGURES)
    notebook.cells.insert(0, setup)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=MAX_CELL_SECONDS, resources=resources, coalesce_streams=True)
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    notebook.cells.remove(setup)
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "varies"}
        for output in cell.get("outputs", ()):
            if "execution_count" in output:
                output.execution_count = None
            if "image/svg+xml" in output.get("data", {}):
                output.data = {"image/svg+xml": compact_svg(output.data["image/svg+xml"])}
        if cell.cell_type == "code":
            cell.execution_count = None  # which would change with every recording
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    return nbformat.writes(notebook) + "\n", {}


def _cell_outputs(text: str) -> Iterator[tuple[str, str]]:
    """Yield what each cell printed and how much of that may vary; a picture is only named."""
    for cell in json.loads(text)["cells"]:
        printed = ""
        for output in cell.get("outputs", ()):
            data: dict[str, Any] = output.get("data", {})
            parts = output.get("text") or data.get("text/plain") or sorted(data)
            printed += "".join(parts)
        yield printed, cell["metadata"].get("varies", "numbers")


def _unequal(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    for number, ((before, varies), (now, _)) in enumerate(zip(old, new, strict=True), start=1):
        if normalised(before, varies) != normalised(now, varies):
            yield number, before, now


def runnable_pages(chosen: list[str]) -> list[str]:
    """Names of the pages that have something to record, among those chosen: pages, or folders of pages."""
    names = [name for name in [*page_names(), "../README"] if not chosen or any(_within(name, each) for each in chosen)]
    texts = {name: page_path(name).read_text(encoding="utf-8") for name in names}
    return [
        name
        for name, text in texts.items()
        if page_path(name).suffix == ".ipynb" or parse(text) or GENERATED.search(text)
    ]


def _within(name: str, chosen: str) -> bool:
    chosen = chosen.removeprefix("docs/").removesuffix(".md").removesuffix(".ipynb").rstrip("/")
    return name.removeprefix("../") == chosen or name.startswith(f"{chosen}/")


def main(chosen: list[str], jobs: int) -> None:
    """Record pages, `jobs` at a time; one that fails keeps its recorded outputs, and the others are still recorded."""
    names = runnable_pages(chosen)
    if not names:
        sys.exit(f"{' '.join(chosen)}: no such page, or nothing to record in it")
    with ThreadPoolExecutor(jobs) as threads:
        succeeded = list(threads.map(_try_to_record, names))
    if failed := [name for name, success in zip(names, succeeded, strict=True) if not success]:
        sys.exit(f"not recorded; make record-docs PAGE='{' '.join(failed)}' tries again")


def _try_to_record(name: str) -> bool:
    began = time.monotonic()
    try:
        record(name)
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    print(f"{name}  {time.monotonic() - began:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="pages that are run at the same time")
    parser.add_argument("pages", nargs="*", help="names of pages or folders; default: all")
    main(parser.parse_args().pages, parser.parse_args().jobs)
