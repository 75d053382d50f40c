"""Run the blocks of a page in an empty folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

from ext.pages import ROOT, Block, PageError
from weft.storage.files import cache_folder

MAX_BLOCK_SECONDS = 600
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
INHERITED = (
    "HOME",
    "TMPDIR",
    "CC",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OMP_WAIT_POLICY",
)


def execute(blocks: Sequence[Block], files: Sequence[str] = ()) -> tuple[list[str], list[bytes]]:
    """Run the blocks and return the output of each, and the contents of `files` at the end.

    A block whose exit code is not its `status`, and a file that is missing, raise PageError.
    """
    with tempfile.TemporaryDirectory(prefix="weft-page-") as parent:
        session = Session(Path(parent))
        try:
            outputs = [session.run(block) for block in blocks]
            for name in files:
                if not (session.folder / name).is_file():
                    raise PageError(blocks[-1].line if blocks else 1, f"the commands wrote no {name}")
            return outputs, [(session.folder / name).read_bytes() for name in files]
        finally:
            session.close()


class Session:
    """The folder, the environment and the Python interpreter of one page."""

    def __init__(self, parent: Path):
        self.folder = parent / "page"
        self.folder.mkdir()
        self._output = parent / "output"
        self._options: dict[str, Any] = {
            "cwd": self.folder,
            "env": _environment(parent / "bin"),
            "start_new_session": True,
        }
        self._interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> str:
        """Run a block, or write its file, and return its output."""
        if block.kind == "file":
            path = self.folder / block.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        if block.kind == "file" or "needs" in block.options:
            return ""
        status = self._shell(block) if block.kind == "sh" else self._python(block)
        output, expected = self._read_output(), int(block.options.get("status", 0))
        if status != expected:
            tail = "\n".join(output.splitlines()[-30:])
            raise PageError(block.line, f"exit code {status}, expected {expected}:\n{block.body}\n{tail}")
        return output

    def _shell(self, block: Block) -> int:
        """Run commands in a new bash, which stops at the first that fails."""
        bash = ["bash", "-e", "-o", "pipefail", "-c", block.body]
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                bash, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **self._options
            )
        try:
            return process.wait(MAX_BLOCK_SECONDS)
        except subprocess.TimeoutExpired:
            raise PageError(block.line, f"still running after {MAX_BLOCK_SECONDS} s:\n{block.body}") from None
        finally:
            _kill(process)  # together with a server that it left running in the background

    def _python(self, block: Block) -> int:
        """Run code in the page's interpreter, which keeps its variables."""
        if self._interpreter is None:
            command = [sys.executable, "-u", str(Path(__file__).with_name("interpreter.py"))]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._interpreter = subprocess.Popen(command, **pipes, **self._options)
        process = self._interpreter
        assert process.stdin is not None and process.stdout is not None
        request = {"code": block.body, "name": f"line {block.line}", "output": str(self._output)}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        if not select([process.stdout], [], [], MAX_BLOCK_SECONDS)[0]:
            raise PageError(block.line, f"still running after {MAX_BLOCK_SECONDS} s:\n{block.body}")
        reply = process.stdout.readline()
        if not reply:  # the process has ended
            raise PageError(block.line, f"Python exited with {process.wait()}:\n{block.body}\n{self._read_output()}")
        return int(reply)

    def _read_output(self) -> str:
        """Return the output of the last block as a terminal would show it, with paths relative to the page's folder."""
        text = ESCAPE.sub("", self._output.read_bytes().decode(errors="replace"))
        lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
        return "\n".join(lines).replace(f"{self.folder}/", "").strip("\n")

    def close(self) -> None:
        if self._interpreter is not None:
            _kill(self._interpreter)


def _kill(process: subprocess.Popen[Any]) -> None:
    """End a process and its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(programs: Path) -> dict[str, str]:
    """Return the variables of a page: `weft` and `python` are this checkout's, whatever is installed elsewhere."""
    programs.mkdir()
    for name, text in {
        "weft": f"#!{sys.executable}\nfrom weft.cli.main import main\n\nmain()\n",
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    cache = programs.parent / "cache"  # of this user, without their progress in exercises
    cache.mkdir()
    for item in cache_folder().glob("*"):
        if item.is_dir():  # compiled libraries, which are not loaded through links
            shutil.copytree(item, cache / item.name)
        elif item.name != "exercises.json":
            (cache / item.name).symlink_to(item)
    return {key: os.environ[key] for key in INHERITED if key in os.environ} | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "WEFT_CACHE": str(cache),
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "LC_ALL": "C.UTF-8",
    }
