"""Find and read comparisons and scaling laws on disk, by the files that `weft compare` and `weft scale` write."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.compare.config import LADDER, PLAN
from weft.config import flat
from weft.errors import RunError, WeftError
from weft.runs.folder import RunFolder
from weft.storage import files

MAX_STUDY_BYTES = 32 << 20  # refuse to read a larger file
# files with the final page's data, with the results so far, and with the request
KINDS = {
    "compare": ("compare.json", "results.jsonl", PLAN),
    "scale": ("scale.json", f"{LADDER}/results.jsonl", f"{LADDER}/{PLAN}"),
}
COMMON = ("name", "seed", "data")  # settings that all contenders share, or that only locate their files


def studies(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the folders of comparisons and scaling laws by name; a path is one of them, or contains some."""
    found: dict[str, Path] = {}
    for path in paths:
        with suppress(OSError):  # removed meanwhile
            for folder in [path] if kind_of(path) else sorted(each for each in path.iterdir() if kind_of(each)):
                found.setdefault(folder.resolve().name, folder)
    return found


def kind_of(folder: Path) -> str:
    """Return "compare" or "scale", or "" for any other folder."""
    return next((kind for kind, names in KINDS.items() if any((folder / name).is_file() for name in names[:2])), "")


def read_study(folder: Path, max_bytes: int = MAX_STUDY_BYTES) -> dict[str, Any]:
    """Return the data of a study's page; for an unfinished one, its command and the number of finished runs."""
    kind = kind_of(folder)
    page, results, plan = (folder / name for name in KINDS[kind])
    try:
        if page.is_file():
            data = json.loads(files.read_text(page, max_bytes))
            if data["kind"] == kind and {"title", "result", "panels"} <= data.keys():
                return {**data, "finished": True, "settings": _differing(folder / "runs")}
            raise ValueError
        command = json.loads(files.read_text(plan, max_bytes))["command"]
        runs = files.read_text(results, max_bytes).count("\n")
        return {"kind": kind, "finished": False, "command": str(command), "runs": runs}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{folder}: its results are damaged; run the comparison again") from None


def _differing(runs: Path) -> dict[str, dict[str, str]]:
    """Return the settings in which the contenders' recipes differ: key → contender → value."""
    recipes: dict[str, Mapping[str, Any]] = {}
    for run in sorted(runs.glob("*/config.toml")):
        with suppress(WeftError, OSError):  # removed meanwhile
            recipes[run.parent.name] = flat(RunFolder(run.parent).recipe().model_dump(mode="json", exclude_none=True))
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe if key.partition(".")[0] not in COMMON)
    rows = {key: {name: str(recipe.get(key, "")) for name, recipe in recipes.items()} for key in keys}
    return {key: row for key, row in rows.items() if len(set(row.values())) > 1}
