"""Exercises as folders of data: text.md, hole.py, reference.py and exercise.toml. Adding one is adding a folder.

`reference.py` computes the expected numbers, in a function with the exercise's name, and draws the cases. A known
mistake is a change of its text, so that the checker can compute the numbers that the mistake gives.
"""

import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, lru_cache
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import Field

import weft
from weft.config import Config, read_toml, validate
from weft.errors import ConfigError, DataError, os_errors, suggestion
from weft.figures.tables import wrap
from weft.storage.files import cache_folder, read_text, replacing, write_text
from weft.workers import Children

if TYPE_CHECKING:
    from weft.course.explanation import Explanation

FOLDER = Path(weft.__file__).parent / "exercises"
MAX_SOURCE_BYTES = 1 << 20  # of a submitted file
COMMAND = (sys.executable, "-m", "weft.course.attempt")
KEPT_VARIABLES = re.compile(r"PATH|HOME|LANG|TMPDIR|TE?MP|SYSTEMROOT|(PYTHON|LC_|LD_|DYLD_).*")
PACKED_AT = (2020, 1, 1, 0, 0, 0)  # of all entries, so that the same exercises give the same archive


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

    def starting_file(self) -> str:
        """Return the file to complete, with the text as its docstring."""
        paragraphs = [text if text[:1] == " " else "\n".join(wrap(text, 110)) for text in self.text.split("\n\n")]
        text = "\n\n".join(paragraphs).replace("\\", "\\\\").replace('"""', "'''").removeprefix("# ")
        hole = self._read("hole.py")
        blank = "\n" if hole.startswith("def ") else ""
        return f'"""{text}\n\nCheck it with: weft exercise check {self.name}.py\n"""\n\n{blank}{hole}'

    def notebook(self) -> str:
        """Return the exercise as a notebook."""
        tree = json.loads(_texts()["notebook"])
        sources = (self.text, self._read("hole.py"), _texts()["check"].format(self.name).strip())
        for cell, source in zip(tree["cells"], sources, strict=True):
            cell["source"] = source.splitlines(keepends=True)
        return json.dumps(tree, ensure_ascii=False, indent=1) + "\n"

    @lru_cache(maxsize=1024)  # noqa: B019  # there are a few hundred in all
    def reference(self, mistake: Mistake | None = None) -> ModuleType:
        """Load reference.py, with the changes of a mistake."""
        text, path = self._read("reference.py"), self.folder / "reference.py"
        for old, new in mistake.change if mistake else ():
            if old not in text:
                raise ConfigError(f"{self.folder / 'exercise.toml'}: a mistake changes {old!r}, which {path} lacks")
            text = text.replace(old, new)
        module = ModuleType(f"exercise_{self.name}")
        module.__file__ = str(path)
        try:
            _TextLoader(str(path), text).exec_module(module)
        except Exception as error:
            raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
        if missing := [name for name in (self.name, "cases") if not callable(getattr(module, name, None))]:
            raise ConfigError(f"{path}: expected a function {missing[0]}")
        return module

    def function(self, mistake: Mistake | None = None) -> Callable[..., Any]:
        """Return the reference's function, with a mistake if one is given."""
        return getattr(self.reference(mistake), self.name)

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
def _texts() -> dict[str, str]:
    return read_toml(FOLDER / "texts.toml")


@cache
def exercises(own: Path | None = None) -> dict[str, Exercise]:
    """Return all exercises by name, in the order of the lectures; `own` is a folder with further ones."""
    if own is not None and not own.is_dir():
        raise ConfigError(f"{own}: no such folder; it should contain a folder for each exercise")
    found = [
        validate(Exercise, {**read_toml(file), "name": file.parent.name, "folder": file.parent}, str(file))
        for folder in filter(None, (FOLDER, own))
        for file in folder.glob("*/exercise.toml")
    ]
    return {each.name: each for each in sorted(found, key=lambda each: (each.lecture, each.minutes, each.name))}


def exercise(name: str, own: Path | None = None) -> Exercise:
    """Return an exercise; raise ConfigError if there is none with this name."""
    known = exercises(own)
    if (found := known.get(name.replace("-", "_"))) is None:
        raise ConfigError(f"no exercise '{name}'; {suggestion(name, known)}; weft exercise lists them")
    return found


def solved_by(path: Path, own: Path | None) -> Exercise:
    """Return the exercise that is called like a file."""
    try:
        return exercise(path.stem, own)
    except ConfigError as error:
        raise DataError(f"{path}: {error}; or name it: weft exercise check {path} NAME") from None


def source_of(path: Path) -> str:
    """Return the code of a submission without its own checks: a file, or the code cells of a notebook."""
    try:
        with os_errors(path):
            text = read_text(path, MAX_SOURCE_BYTES)
        if path.suffix == ".ipynb":
            cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = re.sub(r"^\s*[%!].*$", "", "\n".join(cells) + "\n", flags=re.MULTILINE)
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: not a notebook") from None
    return re.sub(r"^(?:print\()?weft\.check\(.*$", "", text, flags=re.MULTILINE)


@contextmanager
def attempts() -> Iterator[Children]:
    """Yield the processes in which files are run; the first loads torch while this process does something else."""
    dropped = {name: None for name in os.environ if not KEPT_VARIABLES.fullmatch(name)}  # such as a secret
    children = Children(COMMAND, {**dropped, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    with closing(children):
        with children.acquire():
            pass
        yield children


def progress() -> dict[str, list[int]]:
    """Return the numbers of passed and of all cases at the last check of each exercise, by name."""
    with suppress(OSError, ValueError):
        return json.loads(read_text(cache_folder() / "exercises.json"))
    return {}


def record_progress(answer: "Explanation") -> None:
    """Record the result of a check for the list of exercises; a cache that can't be written is not an error."""
    passed = answer.passed if answer.holds else min(answer.passed, answer.cases - 1)
    with suppress(OSError):
        done = {**progress(), answer.name: [passed, answer.cases]}
        write_text(cache_folder() / "exercises.json", json.dumps(done, indent=1) + "\n")


def pack(chosen: Sequence[Exercise], path: Path, *, checks: bool) -> None:
    """Write an archive for students: texts, files with holes, notebooks, and how to begin.

    With `checks`, exercises that are not weft's come with their references: the solutions.
    """
    own = [each for each in chosen if checks and each.folder.parent != FOLDER]
    table = "\n".join(f"| {each.title} | `{each.name}.py` | {each.lecture} | {each.minutes} |" for each in chosen)
    readme = _texts()["readme"].format(table=table, first=chosen[0].name) + (_texts()["own"] if own else "")
    contents = {"README.md": readme}
    for each in chosen:
        contents |= {f"{each.name}.py": each.starting_file(), f"notebooks/{each.name}.ipynb": each.notebook()}
    for each in own:
        files = [file for file in sorted(each.folder.iterdir()) if file.suffix in (".md", ".py", ".toml")]
        contents |= {f"exercises/{each.name}/{file.name}": each._read(file.name) for file in files}
    writing = os_errors(path, verb="written")
    with writing, replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(zipfile.ZipInfo(f"course/{name}", PACKED_AT), text)
