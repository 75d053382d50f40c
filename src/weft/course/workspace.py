"""Folder in which the commands of lectures run; a text or a model that several of them use is made once."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from re import escape, search
from threading import Lock
from typing import NamedTuple

import weft
from weft.course.lectures import EntrySource, LectureEntry, Setup, Verdict, setups
from weft.errors import ConfigError, RunError
from weft.progress import Advance
from weft.storage.files import read_text, remove_folder, write_text
from weft.workers import cores

MAX_SECONDS = 600  # of one command
MAX_WORKERS = 4  # commands at the same time
RECORD = "setup.json"  # what has been made, and by which commands


class EntryResult(NamedTuple):
    """Output of an entry, its figures and verdicts; `error` is the reason why it has none."""

    entry: LectureEntry
    output: str = ""
    figures: tuple[Path, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.error and all(verdict.holds for verdict in self.verdicts)


class Workspace:
    """Runs entries in `folder`, which must be new, empty or a workspace already."""

    def __init__(self, folder: Path) -> None:
        record = folder / RECORD
        if folder.exists() and not record.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: not empty, and not a folder of lectures; choose a new one with --out")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        try:
            self._made: dict[str, str] = json.loads(read_text(record)) if record.is_file() else {}
        except ValueError:
            raise ConfigError(f"{record}: damaged; remove it, or choose a new folder with --out") from None
        self._failed: dict[str, str] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._record_lock = Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._workers = min(MAX_WORKERS, cores())
        self._write_record()

    def run(self, entry: LectureEntry) -> EntryResult:
        """Run one entry, after what it needs has been made."""
        start = time.monotonic()
        try:
            self._prepare(entry.text)
            start = time.monotonic()
            output = self._execute(entry, entry.status)
        except RunError as error:
            return EntryResult(entry, error=str(error), seconds=time.monotonic() - start)
        missing = [name for name in entry.figures if not (self.folder / name).is_file()]
        return EntryResult(
            entry,
            output=output,
            figures=tuple(self.folder / name for name in entry.figures if name not in missing),
            verdicts=tuple(check.verdict(output) for check in entry.checks),
            error=f"{missing[0]}: no such figure was written" if missing else "",
            seconds=time.monotonic() - start,
        )

    def needs(self, entries: Sequence[LectureEntry]) -> list[Setup]:
        """Return the texts and runs that these entries mention, in the order of their list."""
        return [setup for setup in setups() if any(_mentions(entry.text, setup.makes) for entry in entries)]

    def run_all(self, entries: Sequence[LectureEntry], advance: Advance) -> list[EntryResult]:
        """Make what the entries need, then run them, several at the same time, and return their results in order.

        Progress counts both; an entry that waited for a run would keep another from starting.
        """

        def make(setup: Setup) -> None:
            with suppress(RunError), self._locks[setup.makes]:  # entries report what failed
                self._make(setup)
            advance(1)

        def run(entry: LectureEntry) -> EntryResult:
            result = self.run(entry)
            advance(1)
            return result

        with ThreadPoolExecutor(self._workers) as pool:
            for setup in self.needs(entries):
                pool.submit(make, setup)
            futures = [pool.submit(run, entry) for entry in entries]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._processes):
                    process.terminate()
                raise

    def _prepare(self, text: str) -> None:
        """Make the texts and runs that a source mentions, unless they have been made by the same commands before."""
        for setup in setups():
            if setup.text != text and _mentions(text, setup.makes):
                with self._locks[setup.makes]:
                    self._make(setup)

    def _make(self, setup: Setup) -> None:
        if setup.makes in self._failed:
            raise RunError(self._failed[setup.makes])
        source, path = setup.content or setup.text, self.folder / setup.makes
        try:
            self._prepare(source)
            if self._made.get(setup.makes) == source and path.exists():
                return
            if path.is_dir():
                remove_folder(path)  # unfinished, or made by another version
            if setup.content:
                write_text(path, setup.content.lstrip("\n"))
            else:
                self._execute(setup, 0)
        except RunError as error:
            self._failed[setup.makes] = f"{setup.makes} could not be made: {error}"
            raise RunError(self._failed[setup.makes]) from None
        with self._record_lock:
            for other in setups():
                if other != setup and _mentions(other.content or other.text, setup.makes):
                    self._made.pop(other.makes, None)  # made from an earlier version of this
            self._made[setup.makes] = source
            self._write_record()

    def _write_record(self) -> None:
        write_text(self.folder / RECORD, json.dumps(self._made, indent=1, sort_keys=True) + "\n")

    def _execute(self, source: EntrySource, status: int) -> str:
        """Run the commands, or the script, of a source and return what they print."""
        scripts = [["-c", source.python]] if source.python else [["-m", "weft", *words] for words in source.commands]
        return "\n".join(self._output(words, status) for words in scripts)

    def _output(self, words: Sequence[str], status: int) -> str:
        """Return the output of a Python process; raise RunError if its exit code is not `status`.

        As in a shell, `< FILE` at the end redirects its input.
        """
        file = self.folder / words[-1] if "<" in words[-2:-1] else Path(os.devnull)
        words = words[:-2] if "<" in words[-2:-1] else words
        paths = [str(Path(weft.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", "NO_COLOR": "1"}
        environment |= {"PYTHONUTF8": "1", "OMP_NUM_THREADS": str(max(1, cores() // self._workers))}
        with (
            file.open("rb") as stdin,
            subprocess.Popen(
                [sys.executable, "-P", *words],
                cwd=self.folder,
                env=environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            ) as process,
        ):
            self._processes.add(process)
            try:
                output, log = process.communicate(timeout=MAX_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RunError(f"stopped after {MAX_SECONDS} seconds") from None
            finally:
                self._processes.discard(process)
        if process.returncode != status:
            reason = log.strip().rpartition("\n")[2].removeprefix("weft: ") or "no message"
            raise RunError(f"exit code {process.returncode}: {reason}")
        return (output + (log if status else "")).strip("\n")


def _mentions(text: str, path: str) -> bool:
    return search(rf"(?<![\w/-]){escape(path)}(?![\w-])", text) is not None
