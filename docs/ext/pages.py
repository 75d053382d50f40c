"""Pages that run: the blocks of a Markdown file, and the outputs recorded below them.

A page is plain Markdown, which any code host renders. `sh` and `python` blocks are run from top to bottom in one empty
folder, and each is followed by its recorded output:

    <!-- run: lines 12, varies numbers -->    options of the block below
    ```sh
    weft train gpt-tiny --data book.txt
    ```

    ```output
    …
    ```

A file name alone above a block of any language (`recipe.toml`:) makes it a file that the page writes. A comment
`<!-- run sh … -->` or `<!-- run python … -->` holds commands that are run, but not shown. An image below
`figures/PAGE/` is a file that the page's commands write. Text between `<!-- generated: NAME -->` and
`<!-- end -->` is generated from weft.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIGURES = "figures"  # folder of docs/ with one folder per page

OPTIONS = {
    "quiet": "",  # the output is not shown
    "lines": r"\d+",  # only the last lines of the output are shown
    "status": r"\d+",  # the expected exit code
    "varies": r"(text|numbers|/.+/)",  # what may differ from the recorded output: see record.py
    "needs": ".+",  # shown but not run: what it would take
}
COMMENT = re.compile(r"<!-- run: (.*?) -->")
HIDDEN = re.compile(r"<!-- run (sh|python)\n(.*?)\n?-->", re.DOTALL)
FILE_NAME = re.compile(r"`([\w./-]+\.\w+)`:?")
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class PageError(Exception):
    """A mistake in a page, with its line."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Block:
    """A block of a page: commands to run, or a file to write. Lines are counted from 1, `end` is the first after it."""

    kind: str  # sh, python or file
    body: str
    line: int
    end: int
    name: str = ""  # of the file
    hidden: bool = False
    options: dict[str, str] = field(default_factory=dict)
    recorded: str | None = None
    recorded_end: int = 0

    def shown(self, output: str) -> str:
        """Return the part of an output that the page shows."""
        lines = output.splitlines()
        limit = int(self.options.get("lines", len(lines)))
        if self.hidden or "quiet" in self.options:
            return ""
        return "\n".join(lines if len(lines) <= limit else ["…", *lines[-limit:]])


def page_path(name: str, docs: Path = DOCS) -> Path:
    """Return the file of a page: `guides/train`, `notebooks/attention`, or `../README`, the one of the repository."""
    notebook = docs / f"{name}.ipynb"
    return notebook if notebook.is_file() else docs / f"{name}.md"


def page_names(docs: Path = DOCS) -> list[str]:
    """Names of all pages and notebooks of docs/."""
    files = [path for suffix in ("md", "ipynb") for path in docs.rglob(f"*.{suffix}") if ".ipynb_" not in str(path)]
    return sorted(path.relative_to(docs).with_suffix("").as_posix() for path in files)


def parse(text: str) -> list[Block]:
    """Return the blocks of a page, in its order."""
    tokens = MarkdownIt("commonmark").parse(text)
    blocks: list[Block] = []
    for index, token in enumerate(tokens):
        line, end = (token.map[0] + 1, token.map[1] + 1) if token.map else (0, 0)
        before, after = tokens[:index][-2:], tokens[index + 1 : index + 2]
        if token.type == "html_block" and (hidden := HIDDEN.match(token.content)):
            blocks.append(Block(hidden[1], hidden[2] + "\n", line, end, hidden=True, recorded_end=end))
        if token.type != "fence":
            continue
        name, options = "", {}
        if before and before[-1].type == "html_block" and (comment := COMMENT.match(before[-1].content)):
            options = _options(comment[1], line)
        elif before and before[-1].type == "paragraph_close" and (file := FILE_NAME.fullmatch(before[0].content)):
            name = file[1]
        if not name and token.info.strip() not in ("sh", "python"):
            continue
        if token.level:
            raise PageError(line, "a block in a list or a quotation cannot be run")
        if name and not Path(name).resolve().is_relative_to(Path.cwd()):
            raise PageError(line, f"{name}: expected a path inside the page's folder")
        recorded, recorded_end = None, end
        if after and after[0].type == "fence" and after[0].info.strip() == "output" and after[0].map:
            recorded, recorded_end = after[0].content.rstrip("\n"), after[0].map[1] + 1
        kind = "file" if name else token.info.strip()
        blocks.append(
            Block(kind, token.content, line, end, name, options=options, recorded=recorded, recorded_end=recorded_end)
        )
    return blocks


def _options(text: str, line: int) -> dict[str, str]:
    options = {}
    for part in [text] if text.startswith("needs ") else text.split(", "):
        name, _, value = part.partition(" ")
        if name not in OPTIONS:
            raise PageError(line, f"run: no option '{name}'; expected {', '.join(OPTIONS)}")
        if not re.fullmatch(OPTIONS[name], value):
            raise PageError(line, f"run: {name} '{value}': expected {OPTIONS[name] or 'no value'}")
        options[name] = value
    return options


def with_outputs(text: str, blocks: Iterable[Block], outputs: Iterable[str]) -> str:
    """Return the page with these outputs recorded below its blocks, which have none where an output is empty."""
    lines = text.splitlines()
    for block, output in reversed(list(zip(blocks, outputs, strict=True))):
        fence = fence_around(output)
        recorded = ["", f"{fence}output", *output.splitlines(), fence] if output else []
        if block.kind != "file" and "needs" not in block.options:
            lines[block.end - 1 : block.recorded_end - 1] = recorded
    return "\n".join(lines) + "\n"


def fence_around(text: str) -> str:
    """Return a fence that the text does not contain."""
    longest = max((len(run) for run in re.findall(r"^\s*(`{3,})", text, re.MULTILINE)), default=2)
    return "`" * (longest + 1)


def figures_of(name: str, text: str) -> list[str]:
    """Names of the figures of a page that its commands write: the images below figures/PAGE/."""
    inline = [child for token in MarkdownIt("commonmark").parse(text) for child in token.children or ()]
    sources = [str(token.attrs["src"]) for token in inline if token.type == "image"]
    folder = f"{FIGURES}/{name}/"
    return [source.partition(folder)[2] for source in sources if folder in source]
