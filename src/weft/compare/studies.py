"""Comparisons and scaling laws on disk, found by what `weft compare` and `weft scale` leave in their folders."""

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

MAX_STUDY_BYTES = 32 << 20
# what each writes at its end, its results so far, and what was asked for
KINDS = {
    "compare": ("compare.json", "results.jsonl", PLAN),
    "scale": ("scale.json", f"{LADDER}/results.jsonl", f"{LADDER}/{PLAN}"),
}
UNTOLD = ("name", "seed", "data")  # settings that every contender has in common, or that are its place on this machine


def studies(places: Iterable[Path]) -> dict[str, Path]:
    """The folders of comparisons and scaling laws by name: a place is one of them, or holds some."""
    found: dict[str, Path] = {}
    for place in places:
        with suppress(OSError):  # it has gone
            each = [place] if kind_of(place) else sorted(path for path in place.iterdir() if kind_of(path))
            for folder in each:
                found.setdefault(folder.resolve().name, folder)
    return found


def kind_of(folder: Path) -> str:
    """compare or scale; nothing for any other folder."""
    return next((kind for kind, names in KINDS.items() if any((folder / name).is_file() for name in names[:2])), "")


def read_study(folder: Path) -> dict[str, Any]:
    """What its page shows, as values; of one that has not ended, what was asked and how many runs have finished."""
    kind = kind_of(folder)
    end, results, plan = (folder / name for name in KINDS[kind])
    try:
        if end.is_file():
            found = json.loads(files.read_text(end, MAX_STUDY_BYTES))
            if found["kind"] == kind and {"title", "result", "panels"} <= found.keys():
                return {**found, "finished": True, "settings": _differing(folder / "runs")}
            raise ValueError
        command = json.loads(files.read_text(plan, MAX_STUDY_BYTES))["command"]
        runs = files.read_text(results, MAX_STUDY_BYTES).count("\n")
        return {"kind": kind, "finished": False, "command": str(command), "runs": runs}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{folder}: holds no results that weft wrote; run the comparison again") from None


def _differing(runs: Path) -> dict[str, dict[str, str]]:
    """Settings in which the contenders' recipes differ: by key what each has, by its name."""
    recipes: dict[str, Mapping[str, Any]] = {}
    for run in sorted(runs.glob("*/config.toml")):
        with suppress(WeftError, OSError):  # a model may have been removed since
            recipes[run.parent.name] = flat(RunFolder(run.parent).recipe().model_dump(mode="json", exclude_none=True))
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe if key.partition(".")[0] not in UNTOLD)
    rows = {key: {name: str(recipe.get(key, "")) for name, recipe in recipes.items()} for key in keys}
    return {key: row for key, row in rows.items() if len(set(row.values())) > 1}
