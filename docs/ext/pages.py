"""A page that runs: the blocks of a Markdown file, what they print, and where that is kept. Sphinx is not needed here.

    blocks = parse(text)              {run}, {run-python} and {file} blocks, in the order of the page
    outcomes = execute(blocks, page)  run from top to bottom in an empty folder
    kept(page, blocks, store)         the same, but only if the blocks have changed since

The README's blocks are those of `sh` and `python` (`parse_readme`).
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from select import select

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "site" / ".executed"
MAX_BLOCK_SECONDS = 600

FLAGS = ("quiet", "hidden")
VALUES = ("lines", "figure", "alt", "status", "needs")
KINDS = {"run": (*FLAGS, *VALUES), "run-python": (*FLAGS, *VALUES), "file": ("hidden",)}
SHOWN_ONLY = ("quiet", "hidden", "lines", "alt")  # options that change nothing about what is run

FENCE = re.compile(r"\{([\w-]+)\}\s*(.*)")
OPTION = re.compile(r":([\w-]+):\s*(.*)")
NEEDS, FIRST = (re.compile(rf"<!--\s*run:\s*{word}\s+(.*?)\s*-->") for word in ("needs", "first"))
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PageError(Exception):
    """What is wrong with a page, and at which of its lines."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Block:
    """A part of a page that is run, or a file that is written; `argument` is the file's name."""

    kind: str
    body: str
    line: int
    argument: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return int(self.options.get("status", 0))

    @property
    def needs(self) -> str | None:
        """What this machine would have to have, for a block that is not run."""
        return self.options.get("needs")

    @property
    def figures(self) -> list[str]:
        return self.options.get("figure", "").split()


@dataclass(frozen=True)
class Outcome:
    """What a block printed, how it ended, and how long it took."""

    output: str = ""
    status: int = 0
    seconds: float = 0.0

    def last(self, lines: int | None) -> str:
        """The last so many lines of the output, with an ellipsis for those before them."""
        every = self.output.splitlines()
        return "\n".join(every if lines is None or len(every) <= lines else ["…", *every[-lines:]])


# ---- from text to blocks


def parse(text: str, offset: int = 0) -> list[Block]:
    """The blocks of a page, those inside other directives too."""
    blocks: list[Block] = []
    for token in MarkdownIt("commonmark").parse(text):
        found = FENCE.match(token.info) if token.type == "fence" and token.map else None
        if found is None or token.map is None:
            continue
        line = offset + token.map[0] + 1
        if found[1] in KINDS:
            blocks.append(_block(found[1], found[2].strip(), token.content, line))
        else:
            blocks.extend(parse(token.content, line))
    return blocks


def _block(kind: str, argument: str, content: str, line: int) -> Block:
    lines, options = content.splitlines(), {}
    while lines and (option := OPTION.fullmatch(lines[0].strip())):
        name, value = option.groups()
        if name not in KINDS[kind]:
            raise PageError(line, f"{{{kind}}} has no option '{name}'; it has {', '.join(KINDS[kind])}")
        if (name in VALUES) != bool(value):
            raise PageError(line, f"option '{name}' {'needs a value' if name in VALUES else 'takes no value'}")
        if name in ("lines", "status") and not value.isdecimal():
            raise PageError(line, f"{name} = '{value}': expected a whole number")
        options[name] = value
        del lines[0]
    if bool(argument) != (kind == "file"):
        raise PageError(line, f"{{{kind}}} takes no argument" if argument else "{file} needs the file's name")
    if argument and not Path(argument).resolve().is_relative_to(Path.cwd()):
        raise PageError(line, f"{argument}: a page writes into its own folder alone")
    return Block(kind, "\n".join(lines).strip("\n") + "\n", line, argument, options)


def parse_readme(text: str) -> list[Block]:
    """The `sh` and `python` blocks of a README. On the line before, `<!-- run: needs a GPU -->` says that one is not
    run, and `<!-- run: first COMMAND -->` makes what the reader is said to have."""
    blocks: list[Block] = []
    before = ""
    for token in MarkdownIt("commonmark").parse(text):
        kind = {"sh": "run", "python": "run-python"}.get(token.info.strip()) if token.type == "fence" else None
        if kind is not None and token.map:
            line = token.map[0] + 1
            blocks += [Block("run", first + "\n", line, "", {"hidden": ""}) for first in FIRST.findall(before)]
            blocks.append(
                Block(kind, token.content, line, "", {"needs": found[0]} if (found := NEEDS.findall(before)) else {})
            )
        before = token.content if token.type == "html_block" else ""
    return blocks


def digest(blocks: Iterable[Block]) -> str:
    """A hash of all that decides what the blocks do."""
    runs = [
        (each.kind, each.body, each.argument, {k: v for k, v in each.options.items() if k not in SHOWN_ONLY})
        for each in blocks
    ]
    return hashlib.sha256(json.dumps(runs).encode()).hexdigest()[:16]


# ---- from blocks to what they print


def place(page: str, blocks: Iterable[Block], store: Path) -> Path:
    """The folder that keeps what these blocks print, if they have been run."""
    return store / page / digest(blocks)


def kept(page: str, blocks: list[Block], store: Path = STORE, anew: bool = False) -> tuple[list[Outcome], Path]:
    """What the blocks of a page print, and the folder that holds it with the page's figures; run only if it must be."""
    folder = place(page, blocks, store)
    results = folder / "results.json"
    if anew or not results.exists():
        (store / page).mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=store / page, prefix="new-"))
        try:
            outcomes = execute(blocks, new)
            for old in (store / page).glob("*/results.json"):
                shutil.rmtree(old.parent, ignore_errors=True)
            (new / "results.json").write_text(json.dumps([asdict(each) for each in outcomes]))
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return [Outcome(**each) for each in json.loads(results.read_text())], folder


def execute(blocks: list[Block], figures: Path) -> list[Outcome]:
    """Run the blocks in an empty folder, and copy the figures that they name to the folder `figures`.

    A block that ends otherwise than its `status` says, or doesn't write its figure, is a PageError.
    """
    with tempfile.TemporaryDirectory(prefix="weft-page-") as above:
        folder = Path(above) / "page"
        folder.mkdir()
        session = Session(Path(above), folder)
        try:
            return [_outcome(session, block, figures) for block in blocks]
        finally:
            session.close()


def _outcome(session: "Session", block: Block, figures: Path) -> Outcome:
    if block.needs is not None:
        return Outcome()
    if block.kind == "file":
        path = session.folder / block.argument
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body, encoding="utf-8")
        return Outcome()
    started = time.monotonic()
    status = session.shell(block) if block.kind == "run" else session.python(block)
    outcome = Outcome(session.printed(), status, round(time.monotonic() - started, 1))
    if status != block.status:
        raise PageError(block.line, f"exit code {status}, expected {block.status}:\n{block.body}\n{outcome.last(30)}")
    for name in block.figures:
        if not (session.folder / name).is_file():
            raise PageError(block.line, f"the commands wrote no {name}")
        (figures / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(session.folder / name, figures / name)
    return outcome


class Session:
    """The folder, the environment and the Python interpreter of one page."""

    def __init__(self, above: Path, folder: Path):
        self.folder = folder
        self._output = above / "output"
        self._environment = _environment(above / "bin")
        self._interpreter: subprocess.Popen[str] | None = None

    def shell(self, block: Block) -> int:
        """Run a block of commands in a bash of its own, which ends at the first that fails."""
        bash = ["bash", "-e", "-o", "pipefail", "-c", block.body]
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                bash,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(MAX_BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            raise PageError(block.line, f"not done after {MAX_BLOCK_SECONDS} s:\n{block.body}") from None
        finally:
            _end(process)  # a server that was started in the background too

    def python(self, block: Block) -> int:
        """Run a block in the page's interpreter, which keeps its names."""
        process = self._interpreter = self._interpreter or self._start()
        assert process.stdin is not None and process.stdout is not None
        asked = {"code": block.body, "name": f"line {block.line}", "output": str(self._output)}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        ready, _, _ = select([process.stdout], [], [], MAX_BLOCK_SECONDS)
        if not ready:
            raise PageError(block.line, f"not done after {MAX_BLOCK_SECONDS} s:\n{block.body}")
        answer = process.stdout.readline()
        if not answer:  # the process is gone
            raise PageError(block.line, f"Python ended with {process.wait()}:\n{block.body}\n{self.printed()}")
        return int(answer)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("interpreter.py"))],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def printed(self) -> str:
        """What the last block printed, as a terminal would show it, without the name of the page's folder."""
        text = ESCAPE.sub("", self._output.read_bytes().decode(errors="replace"))
        lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
        return "\n".join(lines).replace(f"{self.folder}/", "").strip("\n")

    def close(self) -> None:
        if self._interpreter is not None:
            _end(self._interpreter)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(programs: Path) -> dict[str, str]:
    """Variables for a page: `weft` and `python` are this checkout's, whatever is installed and set outside."""
    programs.mkdir()
    for name, text in {
        "weft": f"#!{sys.executable}\nfrom weft.cli.main import main\n\nmain()\n",
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    mine = {key: value for key, value in os.environ.items() if key in (*CACHES, *MACHINE)}
    return mine | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "LC_ALL": "C.UTF-8",
    }


CACHES = ("HOME", "TMPDIR", "WEFT_CACHE", "XDG_CACHE_HOME")
MACHINE = ("CC", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY")


def sections(text: str) -> Iterator[str]:
    """The text of a page cut at its headings."""
    lines = text.splitlines(keepends=True)
    tokens = MarkdownIt("commonmark").parse(text)
    starts = [token.map[0] for token in tokens if token.type == "heading_open" and token.map and token.level == 0]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        yield "".join(lines[start:end])
