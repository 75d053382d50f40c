"""A run's folder: what is in it, and how a process claims it.

runs/NAME/
  config.toml        the recipe with nothing left open; `weft train runs/NAME/config.toml` repeats the run
  tokenizer.json     Hugging Face format
  metrics.jsonl      losses, rates and norms, a line a logged step: the same again when the run is repeated
  timings.jsonl      seconds and tokens a second, which no two runs share
  events.jsonl       starts, resumes, evaluations, checkpoints, discarded updates, rollbacks
  checkpoints/       step-00000500/ …, interrupted-00000507/ until the next one; `latest` and `best` are links
  data/              the prepared text, where the run prepared it
  base.json          the hash of the weights that an adapter was learned for
  quantized/         weights in fewer bits, as they were last used so, and what --quantize auto has measured
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
from weft.errors import ConfigError, RunError
from weft.progress import Log
from weft.recipe.config import SOURCE_TOKENIZER, Recipe, SettledRecipe
from weft.recipe.objective import upgrade
from weft.runs.lines import append, read, read_lines
from weft.storage import files
from weft.storage.files import locked, sweep, write_text

# what may stand in a folder whose run never reached its first step
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", SOURCE_TOKENIZER}
BEFORE_START = TOKENIZER_FILES | {"data", "base.json", "events.jsonl", ".preflight"}
# step-00000500, which the recipe asked for, or interrupted-00000507
CHECKPOINT = re.compile(r"(step|interrupted)-(\d{8,})")
ENDS = ("start", "resume", "interrupted", "finish")  # events, of which the last says how a run stands
LOCK = ".lock"  # there while a process writes to the run, and in what a killed one left


class RunFolder:
    """The places of a run."""

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
        self.origin = path / "origin"  # what came with an imported model: notes.json, unused.safetensors and files/
        self.report = path / "report.html"

    def recipe(self) -> Recipe:
        """The run's recipe as it was saved. Of a model that was imported it holds what is known."""
        return validate(Recipe, upgrade(read_toml(self.config))[0], str(self.config))

    def settled_recipe(self) -> SettledRecipe:
        """The recipe of a run that was started here."""
        try:
            return validate(SettledRecipe, upgrade(read_toml(self.config))[0], str(self.config))
        except ConfigError as error:
            raise RunError(f"{error}; the recipe of a run that has started has no gaps") from None

    def write_config(self, recipe: Recipe) -> None:
        """Write config.toml: from here on the folder is a run."""
        with writing(self.config):
            write_text(self.config, to_toml(recipe))

    def event(self, what: str, /, **details: Any) -> None:
        """Note that something happened, with the time of day. A full disk does not end the run."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": what, **details}
        try:
            append(self.events, line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise

    def results(self) -> dict[str, Any]:
        """The metrics and samples of the final evaluation; empty for a run that hasn't finished."""
        ends = [line for line in read_lines(self.events) if line.get("event") == "result"]
        return {key: value for key, value in ends[-1].items() if key not in ("time", "event")} if ends else {}

    def id(self) -> str | None:
        """What the run's checkpoints carry; None where the run is older than that."""
        begun = [line.get("id") for line in read(self.events)[0] if line["event"] in ("start", "import")]
        return begun[-1] if begun else None

    def steps(self) -> list[int]:
        """The steps whose checkpoints stand, in order."""
        found = (CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.glob("*-*"))
        return sorted(int(match[2]) for match in found if match)

    def lost_step(self) -> int | None:
        """The step with whose checkpoint the run ended, where that is gone."""
        ends = [line for line in read(self.events)[0] if line["event"] in ENDS]
        step = ends[-1].get("step") if ends and ends[-1]["event"] in ("interrupted", "finish") else None
        return None if step in self.steps() else step


class FollowedRun(RunFolder):
    """A run that another process leads and writes: it is read from here, and nothing is written into its folder."""

    def __init__(self, path: Path | str):
        super().__init__(path)
        self.scratch = Path(tempfile.gettempdir()) / f"weft-preflight-{os.getpid()}"

    def event(self, what: str, /, **details: Any) -> None:
        """The leading process notes it."""


@contextmanager
def claimed(path: Path | str) -> Iterator[RunFolder]:
    """A folder for a new run, to which this process alone writes.

    An existing run, a folder with other things in it and an unwritable place are refused, before any work starts. What
    a start that was killed left behind is taken over; one that fails in here leaves nothing of its own.
    """
    run = RunFolder(path)
    with writing(run.path):
        _refuse_run(run)
        missing = [place for place in (run.path, *run.path.parents) if not place.exists()]
        run.path.mkdir(parents=True, exist_ok=True)
        entries = {entry.name for entry in run.path.iterdir()}
        known = BEFORE_START if LOCK in entries else set()  # without it, nothing in here is ours
        others = sorted(name for name in entries - known if not (known and name.startswith(".")))
        if others:
            raise RunError(f"{run.path}: the folder holds other things ({others[0]} …); choose another with --run")
    with held(run):
        _refuse_run(run)  # another process may have begun one since
        try:
            yield run
        except BaseException:
            if not run.config.exists():
                _clear(run, missing or ([run.path] if entries else []))
            raise


def _refuse_run(run: RunFolder) -> None:
    if run.config.exists():
        raise RunError(
            f"{run.path}: a run is already here; continue it with `weft train --resume {run.path}`, "
            "or choose another folder with --run"
        )


def _clear(run: RunFolder, folders: Sequence[Path]) -> None:
    """Remove what a start has made before its first step, and those folders, inside out, that hold nothing else."""
    for place in (run.path / name for name in BEFORE_START | {LOCK}):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
    with suppress(OSError):  # there is something else
        for folder in folders:
            folder.rmdir()


@contextmanager
def held(run: RunFolder) -> Iterator[None]:
    """Keep other processes from writing to a run. One that is killed lets go of it; what it left is swept away."""
    lock = run.path / LOCK
    _refuse_links(run)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock))
        except BlockingIOError:
            cure = "wait for it, or choose another folder with --run"
            raise RunError(f"{run.path}: another process is training there; {cure}") from None
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror or error}") from None
        stack.callback(lock.unlink, missing_ok=True)
        with writing(run.path):
            for folder in (run.path, run.checkpoints, run.data, run.quantized):
                sweep(folder)
        yield


def _refuse_links(run: RunFolder) -> None:
    """A run may come from elsewhere: what is written to it must not land outside it, nor be removed there.

    Only `latest` and `best` are links, to checkpoints beside them.
    """
    for folder in (run.path, run.checkpoints, run.data):
        inside = list(os.scandir(folder)) if folder.is_dir() else []
        if odd := [entry.path for entry in inside if not (entry.is_symlink() or entry.is_file() or entry.is_dir())]:
            raise RunError(f"{odd[0]}: a pipe or a device, to which weft can't write; move it away")
        for link in [entry.path for entry in inside if entry.is_symlink()]:
            if folder != run.checkpoints or os.path.dirname(os.readlink(link)):
                cure = "put what it points to in its place"
                raise RunError(f"{link}: a link, through which weft would write outside the run; {cure}")


@contextmanager
def writing(target: Path, what: str = "") -> Iterator[None]:
    """A failure in here becomes one line that names the target."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{target}: {what}cannot be written: {reason}") from None


def open_run(path: Path | str) -> RunFolder:
    """The folder of a run that has started."""
    run = RunFolder(path)
    if not run.config.is_file():
        known = "no such folder" if not run.path.exists() else "there is no config.toml in it"
        # the runs that may be meant: those in the same folder and in runs/, by their names
        places = [file.parent for base in {run.path.parent, Path("runs")} for file in base.glob("*/config.toml")]
        near = get_close_matches(run.path.name, {place.name for place in places}, n=3)
        found = sorted(str(place) for place in places if place.name in near)
        meant = f"; did you mean {' or '.join(found)}?" if found else ""
        raise RunError(f"{run.path}: not a run: {known}{meant}")
    return run


# ---- the small files that decide what a run computes, hashed when it starts, so that a change doesn't go unseen
#
# A person may change config.toml or a chat template on purpose: a change is reported, not refused, and once the run is
# resumed it is the new state of things.


def note_files(run: RunFolder) -> None:
    """Write down what the files are now."""
    run.event("files", sha256={path.relative_to(run.path).as_posix(): _hash(path) for path in _files(run)})


def changed_files(run: RunFolder, origin: bool = False) -> list[str]:
    """A message for each file that has changed since it was last noted, or is gone; with `origin`, of those as well
    that came with an imported model, which only an export reads."""
    noted = next((e["sha256"] for e in reversed(read_lines(run.events)) if e["event"] == "files"), None)
    if noted is None:
        return []
    now = {path.relative_to(run.path).as_posix(): path for path in _files(run)}
    wanted = [name for name in {**noted, **now} if origin or not name.startswith(f"{run.origin.name}/")]
    names = [name for name in wanted if name not in now or noted.get(name) != _hash(now[name])]

    def change(name: str) -> str:
        return "gone missing" if name not in now else "been added" if name not in noted else "changed"

    return [f"{run.path / name}: has {change(name)} since the run last started" for name in names]


def report_changes(run: RunFolder, log: Log) -> None:
    """Log and note every change; from here on it is the state of things."""
    for line in changed_files(run):
        run.event("changed", line=line)
        log(line)
    note_files(run)


def _files(run: RunFolder) -> Iterator[Path]:
    folders = [run.path / name for name in sorted(TOKENIZER_FILES) if (run.path / name).is_dir()]
    inside = (path for folder in (*folders, run.origin) for path in sorted(folder.rglob("*")))
    beside = (run.path / name for name in (run.config.name, run.base.name, *sorted(TOKENIZER_FILES)))
    return (path for path in (*beside, *inside) if path.is_file())


def _hash(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
