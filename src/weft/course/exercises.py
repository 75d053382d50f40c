"""Exercises as folders of data: text.md, hole.py, reference.py and exercise.toml. Adding one is adding a folder.

`reference.py` computes the expected numbers, in a function with the exercise's name, and draws the cases. A known
mistake is a change of its text, so that the checker can compute the numbers that the mistake gives.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field

import weft
from weft.config import Config, read_toml, validate
from weft.errors import ConfigError, DataError, suggestion
from weft.figures.tables import wrap
from weft.storage.files import cache_folder, read_text, write_text
from weft.workers import Children

FOLDER = Path(weft.__file__).parent / "exercises"
MAX_SOURCE_BYTES = 1 << 20  # of a submitted file
COMMAND = (sys.executable, "-m", "weft.course.attempt")
CHECK_CELL = 'import weft\n\nweft.check({0}, "{0}")'


class Mistake(Config):
    """Known mistake: a sentence about it, and the changes of the reference's text that make it."""

    says: str
    change: tuple[tuple[str, str], ...] = Field(min_length=1)


class Exercise(Config):
    """Exercise. The keys of `formulas` are the variables that the checker looks at, in the order of computation.

    `gradients` are arguments whose gradients are compared too, and `batch` those whose first dimension is the batch.
    """

    name: str = Field(pattern=r"[a-z][a-z0-9_]*")
    folder: Path
    title: str
    lecture: int = Field(ge=1)
    minutes: int = Field(ge=1)
    slide: str
    paper: str
    outputs: tuple[str, ...] = Field(min_length=1)
    formulas: dict[str, str]
    mistakes: tuple[Mistake, ...] = ()
    gradients: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.folder))

    @property
    def text(self) -> str:
        """Page of the exercise in Markdown: its text, formulas, slide and paper."""
        formulas = "\n".join(f"    {name} = {formula}" for name, formula in self.formulas.items())
        about = f"Lecture {self.lecture}, {self.slide}. {self.paper}. About {self.minutes} minutes."
        return f"# {self.title}\n\n{self._read('text.md').strip()}\n\n{formulas}\n\n{about}\n"

    @property
    def hole(self) -> str:
        """File to complete, without the text."""
        return self._read("hole.py")

    def starting_file(self) -> str:
        """Return the file to complete, with the text as its docstring."""
        paragraphs = [text if text[:1] == " " else "\n".join(wrap(text, 110)) for text in self.text.split("\n\n")]
        text = "\n\n".join(paragraphs).replace("\\", "\\\\").replace('"""', "'''").removeprefix("# ")
        return f'"""{text}\n\nCheck it with: weft exercise check {self.name}.py\n"""\n\n{self.hole}'

    def notebook(self) -> str:
        """Return the exercise as a notebook."""
        cells = [("markdown", self.text), ("code", self.hole), ("code", CHECK_CELL.format(self.name))]
        code: dict[str, Any] = {"execution_count": None, "outputs": []}
        tree = {
            "cells": [
                {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
                | (code if kind == "code" else {})
                for number, (kind, source) in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        return json.dumps(tree, ensure_ascii=False, indent=1) + "\n"

    @lru_cache(maxsize=1024)  # noqa: B019  # there are a few hundred in all
    def reference(self, mistake: Mistake | None = None) -> ModuleType:
        """Load reference.py, with the changes of a mistake."""
        text, path = self._read("reference.py"), self.folder / "reference.py"
        for old, new in mistake.change if mistake else ():
            if old not in text:
                raise ConfigError(f"{self.folder / 'exercise.toml'}: a mistake changes {old!r}, which {path} lacks")
            text = text.replace(old, new)
        loader = _TextLoader(str(path), text)
        spec = importlib.util.spec_from_loader(f"exercise_{self.name}", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
        missing = [name for name in (self.name, "cases") if not callable(getattr(module, name, None))]
        if missing:
            raise ConfigError(f"{path}: expected a function {missing[0]}")
        return module

    def _read(self, name: str) -> str:
        try:
            return read_text(self.folder / name, MAX_SOURCE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.folder / name}: {getattr(error, 'strerror', None) or error}") from None


class _TextLoader(SourceLoader):
    """Loads a module from a text; `path` is only its name in a traceback."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str | bytes) -> bytes:
        return self.text.encode()


@cache
def exercises(own: Path | None = None) -> dict[str, Exercise]:
    """Return all exercises by name, in the order of the lectures; `own` is a folder with further ones."""
    if own is not None and not own.is_dir():
        raise ConfigError(f"{own}: no such folder; it should contain a folder for each exercise")
    files = [file for folder in (FOLDER, *([own] if own else [])) for file in sorted(folder.glob("*/exercise.toml"))]
    found = [
        validate(Exercise, {**read_toml(file), "name": file.parent.name, "folder": file.parent}, str(file))
        for file in files
    ]
    return {each.name: each for each in sorted(found, key=lambda each: (each.lecture, each.minutes, each.name))}


def exercise(name: str, own: Path | None = None) -> Exercise:
    """Return an exercise; raise ConfigError if there is none with this name."""
    known = exercises(own)
    if (found := known.get(name.replace("-", "_"))) is None:
        raise ConfigError(f"no exercise '{name}'; {suggestion(name, known)}; weft exercise lists them")
    return found


def source_of(path: Path) -> str:
    """Return the code of a submission without its own checks: a file, or the code cells of a notebook."""
    try:
        text = read_text(path, MAX_SOURCE_BYTES)
        if path.suffix == ".ipynb":
            cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = re.sub(r"^\s*[%!].*$", "", "\n".join(cells) + "\n", flags=re.MULTILINE)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not a notebook") from None
    return re.sub(r"^(?:print\()?weft\.check\(.*$", "", text, flags=re.MULTILINE)


@contextmanager
def attempts() -> Iterator[Children]:
    """Yield the processes in which files are run; the first loads torch while this process does something else."""
    children = Children(COMMAND, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        with children.acquire():
            pass
        yield children
    finally:
        children.close()


def progress() -> dict[str, list[int]]:
    """Return the numbers of passed and of all cases at the last check of each exercise, by name."""
    try:
        return json.loads(read_text(_progress_file()))
    except (OSError, ValueError):
        return {}


def record_progress(name: str, passed: int, cases: int) -> None:
    """Record the result of a check for the list of exercises; a cache that can't be written is not an error."""
    with suppress(OSError):
        write_text(_progress_file(), json.dumps({**progress(), name: [passed, cases]}, indent=1) + "\n")


def _progress_file() -> Path:
    return cache_folder() / "exercises.json"


def solved_by(path: Path, name: str, own: Path | None) -> Exercise:
    """Return the exercise that a file solves: `name`, or the one that is called like the file."""
    try:
        return exercise(name or path.stem, own)
    except ConfigError as error:
        if name:
            raise
        raise DataError(f"{path}: {error}; or name it: weft exercise check {path} NAME") from None
