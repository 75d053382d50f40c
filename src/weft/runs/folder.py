"""A run's folder: its files, and how a process claims and locks it.

runs/NAME/
  config.toml        the complete recipe; `weft train runs/NAME/config.toml` repeats the run
  tokenizer.json     Hugging Face format
  metrics.jsonl      losses, learning rates and norms, one line per logged step; identical when the run is repeated
  timings.jsonl      seconds and tokens per second, which differ between runs
  events.jsonl       starts, resumes, evaluations, checkpoints, discarded updates, rollbacks
  checkpoints/       step-00000500/ …, interrupted-00000507/ until the next one; `latest` and `best` are links
  data/              the prepared text, if the run prepared it
  base.json          hash of the weights that an adapter was trained for
  quantized/         quantised weights from their last use, and the measurements of --quantize auto
  report.html        curves, samples, counts
"""

import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from weft.config import read_toml, to_toml, validate
from weft.errors import ConfigError, RunError, listed, quoted
from weft.models.presets import PRESETS
from weft.progress import Log
from weft.recipe.config import SOURCE_TOKENIZER, Recipe, SettledRecipe
from weft.recipe.objective import upgrade
from weft.runs.lines import append, read, read_lines
from weft.storage import files
from weft.storage.files import locked, sweep, write_text

# files that a run writes before its first step
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", SOURCE_TOKENIZER}
BEFORE_START = TOKENIZER_FILES | {"data", "base.json", "events.jsonl", ".preflight"}
# step-00000500, a regular checkpoint, or interrupted-00000507
CHECKPOINT = re.compile(r"(step|interrupted)-(\d{8,})")
STATES = ("start", "resume", "interrupted", "finish")  # events that change a run's state; the last one is its state
LOCK = ".lock"  # exists while a process writes to the run, and after a process was killed


class RunFolder:
    """Paths and records of a run."""

    def __init__(self, path: Path | str):
        self.path = path = Path(path)
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.scratch = path / ".preflight"
        self.data = path / "data"
        self.source_tokenizer = path / SOURCE_TOKENIZER
        self.base = path / "base.json"
        self.quantized = path / "quantized"
        self.origin = path / "origin"  # files of an imported model: notes.json, unused.safetensors and files/
        self.report = path / "report.html"

    def recipe(self) -> Recipe:
        """Return the run's saved recipe; that of an imported model may have gaps."""
        return validate(Recipe, upgrade(read_toml(self.config))[0], str(self.config))

    def settled_recipe(self) -> SettledRecipe:
        """Return the complete recipe of a run that was started here."""
        try:
            return validate(SettledRecipe, upgrade(read_toml(self.config))[0], str(self.config))
        except ConfigError as error:
            raise RunError(f"{error}; the recipe of a started run must be complete") from None

    def write_config(self, recipe: Recipe) -> None:
        """Write config.toml, which makes the folder a run."""
        with writing(self.config):
            write_text(self.config, to_toml(recipe))

    def event(self, name: str, /, **details: Any) -> None:
        """Append an event to events.jsonl, with the time. A full disk doesn't stop the run."""
        try:
            append(self.events, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": name, **details})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise

    def results(self) -> dict[str, Any]:
        """Return the metrics and samples of the final evaluation; empty for a run that hasn't finished."""
        results = [line for line in read_lines(self.events) if line.get("event") == "result"]
        return {key: value for key, value in results[-1].items() if key not in ("time", "event")} if results else {}

    def id(self) -> str | None:
        """Return the id that the run's checkpoints carry; None for a run of an older version."""
        ids = [line.get("id") for line in read(self.events)[0] if line["event"] in ("start", "import")]
        return ids[-1] if ids else None

    def steps(self) -> list[int]:
        """Return the steps of the existing checkpoints, in order."""
        matches = (CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.glob("*-*"))
        return sorted(int(match[2]) for match in matches if match)

    def lost_step(self) -> int | None:
        """Return the step at which the run ended, if the checkpoint of that step is missing."""
        states = [line for line in read(self.events)[0] if line["event"] in STATES]
        step = states[-1].get("step") if states and states[-1]["event"] in ("interrupted", "finish") else None
        return None if step in self.steps() else step


class FollowedRun(RunFolder):
    """Run of a distributed job as other ranks than 0 see it: read here, written by rank 0 alone."""

    def __init__(self, path: Path | str):
        super().__init__(path)
        self.scratch = Path(tempfile.gettempdir()) / f"weft-preflight-{os.getpid()}"

    def event(self, name: str, /, **details: Any) -> None:
        """Do nothing: rank 0 records events."""


@contextmanager
def claim_run(path: Path | str) -> Iterator[RunFolder]:
    """Create and lock the folder of a new run.

    An existing run, a folder with other files and an unwritable path are refused before any work starts. Leftovers of a
    start that was killed are taken over; a start that fails inside this context leaves no files.
    """
    run = RunFolder(path)
    with writing(run.path):
        _refuse_run(run)
        created = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
        run.path.mkdir(parents=True, exist_ok=True)
        entries = {entry.name for entry in run.path.iterdir()}
        ours = BEFORE_START if LOCK in entries else set()  # without a lock, none of the files are weft's
        others = sorted(name for name in entries - ours if not (ours and name.startswith(".")))
        if others:
            raise RunError(f"{run.path}: the folder holds other files ({others[0]} …); choose another with --run")
    with lock_run(run):
        _refuse_run(run)  # another process may have started one since
        try:
            yield run
        except BaseException:
            if not run.config.exists():
                leftovers = [run.path / name for name in BEFORE_START | {LOCK}]
                remove_start(leftovers, created or ([run.path] if entries else []))
            raise


def _refuse_run(run: RunFolder) -> None:
    if run.config.exists():
        hint = f"continue it with `weft train --resume {quoted(run.path)}`, or choose another folder with --run"
        raise RunError(f"{run.path}: a run is already here; {hint}")


def remove_start(paths: Sequence[Path], folders: Sequence[Path]) -> None:
    """Remove the files and folders `paths` of a failed start, then `folders`, innermost first, if they are empty."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        for folder in folders:
            folder.rmdir()


@contextmanager
def lock_run(run: RunFolder) -> Iterator[None]:
    """Lock a run until exit, or until this process is killed; remove temporary files of earlier killed processes."""
    lock = run.path / LOCK
    _refuse_links(run)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock))
        except BlockingIOError:
            hint = "wait for it, or choose another folder with --run"
            raise RunError(f"{run.path}: another process is training there; {hint}") from None
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror or error}") from None
        stack.callback(lock.unlink, missing_ok=True)
        with writing(run.path):
            for folder in (run.path, run.checkpoints, run.data, run.quantized):
                sweep(folder)
        yield


def _refuse_links(run: RunFolder) -> None:
    """Refuse links out of a run's folder: a run may be untrusted, and nothing outside it must be written or removed.

    Only `latest` and `best` are links, to checkpoints in the same folder.
    """
    for folder in (run.path, run.checkpoints, run.data):
        entries = list(os.scandir(folder)) if folder.is_dir() else []
        links = [entry.path for entry in entries if entry.is_symlink()]
        if special := [e.path for e in entries if not (e.is_symlink() or e.is_file() or e.is_dir())]:
            raise RunError(f"{special[0]}: a pipe or a device, to which weft can't write; move it away")
        for link in links:
            if folder != run.checkpoints or os.path.dirname(os.readlink(link)):
                hint = "through which weft would write outside the run; replace it with its target"
                raise RunError(f"{link}: a link, {hint}")


@contextmanager
def writing(target: Path, what: str = "") -> Iterator[None]:
    """Turn a failure to write inside this context into a RunError that names the target."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{target}: {what}cannot be written: {getattr(error, 'strerror', None) or error}") from None


def open_run(path: Path | str) -> RunFolder:
    """Return the folder of an existing run; suggest similar names next to it and in runs/ if there is none."""
    run = RunFolder(path)
    if not run.config.is_file():
        reason = _why_no_run(run.path)
        others = [file.parent for base in {run.path.parent, Path("runs")} for file in base.glob("*/config.toml")]
        near = [] if run.path.exists() else get_close_matches(run.path.name, {other.name for other in others}, n=3)
        names = sorted(str(other) for other in others if other.name in near)
        hint = f"; did you mean {' or '.join(names)}?" if names else ""
        raise RunError(f"{run.path}: not a run: {reason}{hint}")
    return run


def _why_no_run(path: Path) -> str:
    holders = (folder for folder in path.parents[:3] if path.exists() and RunFolder(folder).config.exists())
    if (inside := next(holders, None)) is not None:
        return f"a part of one; give {inside}"
    if not path.exists():
        preset = path.name in PRESETS and str(path) == path.name
        stale = path.is_symlink() and f"a link to {os.readlink(path)}, which is missing"
        return f"a preset; train it first: weft train {path} --data FILE" if preset else stale or "no such folder"
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        imported = quoted(f"runs/{path.stem if path.is_file() else path.name}")
        return f"another program's model; import it first: weft import {quoted(path)} {imported}"
    if not path.is_dir():
        return "a file; give the folder of a run"
    runs = sorted(str(config.parent) for config in path.glob("*/config.toml"))
    return f"a folder of runs; give one: {listed(runs)}" if runs else "there is no config.toml in it"


# ---- hashes of the small files that decide what a run computes, recorded when it starts
#
# A user may change config.toml or a chat template on purpose. So a change is reported, not refused, and accepted when
# the run is resumed.


def note_files(run: RunFolder) -> None:
    """Record the current hashes."""
    run.event("files", sha256={path.relative_to(run.path).as_posix(): _hash(path) for path in _files(run)})


def changed_files(run: RunFolder, origin: bool = False) -> list[str]:
    """Return a message for each file that was changed, added or removed since the hashes were recorded.

    `origin` includes the original files of an imported model, which only an export reads.
    """
    recorded = next((e["sha256"] for e in reversed(read_lines(run.events)) if e["event"] == "files"), None)
    if recorded is None:
        return []
    now = {path.relative_to(run.path).as_posix(): path for path in _files(run)}
    relevant = [name for name in {**recorded, **now} if origin or not name.startswith(f"{run.origin.name}/")]
    names = [name for name in relevant if name not in now or recorded.get(name) != _hash(now[name])]

    def change(name: str) -> str:
        return "gone missing" if name not in now else "been added" if name not in recorded else "changed"

    return [f"{run.path / name}: has {change(name)} since the run last started" for name in names]


def report_changes(run: RunFolder, log: Log) -> None:
    """Log every change since the hashes were recorded, and record the current ones."""
    for line in changed_files(run):
        run.event("changed", line=line)
        log(line)
    note_files(run)


def _files(run: RunFolder) -> Iterator[Path]:
    folders = [run.path / name for name in sorted(TOKENIZER_FILES) if (run.path / name).is_dir()]
    nested = (path for folder in (*folders, run.origin) for path in sorted(folder.rglob("*")))
    top = (run.path / name for name in (run.config.name, run.base.name, *sorted(TOKENIZER_FILES)))
    return (path for path in (*top, *nested) if path.is_file())


def _hash(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
