"""An archive of exercises for students: texts, files with holes, notebooks, and how to begin."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from weft.course.exercises import FOLDER, Exercise
from weft.errors import DataError
from weft.storage.files import replacing

TIME = (2020, 1, 1, 0, 0, 0)  # of all entries, so that the same exercises give the same archive
BEGIN = """# Exercises

{table}

Complete a file, and check it as often as you like:

    weft exercise check attention.py

In a notebook, run its last cell. Nothing is downloaded, and no GPU is needed.
{own}"""
OWN = """
Exercises of this course are in the folder `exercises`; tell weft where it is:

    weft exercise check NAME.py --exercises exercises
"""


def pack(chosen: Sequence[Exercise], path: Path, *, checks: bool) -> None:
    """Write the archive. With `checks`, exercises that are not weft's come with their references: the solutions."""
    own = [each for each in chosen if each.folder.parent != FOLDER]
    rows = [f"| {each.title} | `{each.name}.py` | {each.lecture} | {each.minutes} |" for each in chosen]
    table = "\n".join(["| exercise | file | lecture | minutes |", "|---|---|---|---|", *rows])
    contents = {"README.md": BEGIN.format(table=table, own=OWN if checks and own else "")}
    for each in chosen:
        contents |= {f"{each.name}.py": each.starting_file(), f"notebooks/{each.name}.ipynb": each.notebook()}
        if checks and each in own:
            files = [
                file
                for file in sorted(each.folder.iterdir())
                if file.is_file() and file.suffix in (".md", ".py", ".toml")
            ]
            contents |= {f"exercises/{each.name}/{file.name}": file.read_text(encoding="utf-8") for file in files}
    try:
        with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in contents.items():
                archive.writestr(zipfile.ZipInfo(f"course/{name}", TIME), text)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
