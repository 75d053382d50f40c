"""Texts and tasks that need no download; a data source names them as `builtin:NAME`.

The corpus `python` is the documentation that comes with every Python: the topics of `help()` and the docstrings of the
standard library, more than two million characters of English prose about code. The library's sources are parsed,
never imported, so nothing runs. The same Python gives the same corpus, byte for byte.

A task has rows to learn from and rows held out, drawn from small grammars:

    for row in task_rows("dates", "train"): …        {"source": "3 May 1999", "target": "1999-05-03"}

The same name gives the same rows everywhere and always. What is held out is so by construction: a hash of the item (the
day, the number, the sentence) puts it on one side, whatever else is drawn.
"""

import ast
import contextlib
import hashlib
import inspect
import json
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from weft.errors import DataError, suggestion
from weft.progress import bar
from weft.storage import files
from weft.storage.files import cache_folder, write_text
from weft.text.grammars import rewriting, sentences
from weft.text.grammars.rng import Mine, Rng, Row

try:
    from pydoc_data.topics import topics
except ImportError:  # some distributions ship it apart; the docstrings remain
    topics = {}  # type: ignore[misc]

CORPORA = ("python",)
FORMAT = 1  # of the cached file; raise it when the text below changes
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}


class Corpus(NamedTuple):
    """The documents of a corpus, always in the same order, and the sha256 that identifies them."""

    documents: list[str]
    sha256: str


def corpus(name: str) -> Corpus:
    """A built-in corpus, from the cache where it has been assembled before; that takes some seconds once."""
    name = name.removeprefix("builtin:")
    if name not in CORPORA:
        raise DataError(f"builtin:{name}: no such built-in corpus; {suggestion(name, CORPORA)}")
    sources = Path(sysconfig.get_path("stdlib"))
    # two Pythons of one version may ship different libraries, so the place of the sources is in the name
    place = hashlib.sha256(str(sources).encode()).hexdigest()[:8]
    cache = cache_folder() / f"builtin-python-{platform.python_version()}-{place}-{FORMAT}.json"
    try:
        found = json.loads(files.read_text(cache))
    except (OSError, ValueError):
        found = None
    if not (isinstance(found, list) and found and all(isinstance(text, str) for text in found)):
        # the pages of `help("topics")`, chapters of the language reference; some pages answer to two names
        pages = (inspect.cleandoc(topics[name]) + "\n" for name in sorted(topics) if topics[name].strip())
        found = list(dict.fromkeys(pages)) + _module_docstrings(sources)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            write_text(cache, json.dumps(found, ensure_ascii=False))
    return Corpus(found, hashlib.sha256("\0".join(found).encode()).hexdigest())


def _module_docstrings(sources: Path) -> list[str]:
    """A document for each module of the standard library: its docstrings under the names they belong to."""
    files = sorted(file for file in sources.rglob("*.py") if not SKIPPED & set(file.relative_to(sources).parts))
    if not files:
        raise DataError(f"builtin:python: {sources} holds no Python sources; install them, or give a text of your own")
    seen: set[str] = set()
    found = []
    with bar("reading Python's documentation", len(files)) as advance:
        for file in files:
            module = ".".join(file.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
            parts = []
            for name, text in _docstrings(file):
                if text not in seen:  # copied from class to class, or from module to module
                    seen.add(text)
                    parts.append(f"{name or f'module {module}'}\n\n{text}\n")
            if parts:
                found.append("\n".join(parts))
            advance(1)
    return found


def _docstrings(file: Path) -> list[tuple[str, str]]:
    """(qualified name, docstring) of everything in a module that has one; the module's own has no name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a source is no concern of ours
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a broken or foreign file among the sources
        return []
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((name, text.encode("utf-8", "replace").decode()))  # a docstring may hold half a pair
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, f"{name}.{child.name}".lstrip("."))
            elif isinstance(child, ast.stmt):
                walk(child, name)

    walk(tree, "")
    return found


class Task(NamedTuple):
    """A task: the grammar that draws a row, and how many rows each side has."""

    draw: Callable[[Rng, Mine], Row | None]
    train: int = 20_000
    validation: int = 1_000


TASKS = {
    "copy": Task(rewriting.copy),
    "reverse": Task(rewriting.reverse),
    "dates": Task(rewriting.words_to_date),
    "dates-back": Task(rewriting.date_to_words),
    "numbers": Task(rewriting.words_to_number),
    "numbers-back": Task(rewriting.number_to_words),
    "sentiment": Task(sentences.opinion),
    "questions": Task(sentences.question),
    "chatter": Task(sentences.conversation, train=10_000, validation=500),
}
TASK_SOURCES = {f"builtin:{name}" for name in TASKS}


def task_rows(name: str, side: Literal["train", "validation"]) -> Iterator[Row]:
    """The rows of one side of a task, all different."""
    task, held_out = TASKS[name], side == "validation"
    rng = Rng(f"weft {name} {side}")
    seen: set[str] = set()

    def mine(key: str) -> bool:
        """One item in ten is held out, and which ones never changes."""
        digest = hashlib.sha256(f"{name}\0{key}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") % 10 == 0) == held_out

    while len(seen) < (task.validation if held_out else task.train):
        row = task.draw(rng, mine)
        if row is not None and (written := json.dumps(row)) not in seen:
            seen.add(written)
            yield row
