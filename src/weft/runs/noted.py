"""The small files that decide what a run computes, hashed when it starts, so that a change to one doesn't go unseen.

A person may change config.toml or a chat template on purpose: a change is reported, not refused, and once the run is
resumed it is the new state of things.
"""

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

from weft.progress import Log
from weft.runs.folder import TOKENIZER_FILES, RunFolder
from weft.runs.lines import read_lines


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
    return [f"{run.path / name}: {_change(name, noted, now)} since the run last started" for name in names]


def report_changes(run: RunFolder, log: Log) -> None:
    """Log and note every change; from here on it is the state of things."""
    for line in changed_files(run):
        run.event("changed", line=line)
        log(line)
    note_files(run)


def _change(name: str, noted: Collection[str], now: Collection[str]) -> str:
    if name not in now:
        return "has gone missing"
    return "has been added" if name not in noted else "has changed"


def _files(run: RunFolder) -> Iterator[Path]:
    folders = [run.path / name for name in sorted(TOKENIZER_FILES) if (run.path / name).is_dir()]
    inside = (path for folder in (*folders, run.origin) for path in sorted(folder.rglob("*")))
    beside = (run.path / name for name in (run.config.name, run.base.name, *sorted(TOKENIZER_FILES)))
    return (path for path in (*beside, *inside) if path.is_file())


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
