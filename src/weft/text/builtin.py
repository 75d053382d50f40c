"""Built-in texts and tasks, which need no download; a data source names them as `builtin:NAME`.

The corpus `python` is Python's documentation: the topics of `help()` and the docstrings of the standard library, more
than two million characters of English prose about code. The library's sources are parsed, not imported, so no code
runs. The same Python gives the same corpus, byte for byte.

The corpus `stories` is short stories of a small grammar, each about one person's work, so that its sentences belong
together: `The baker kneads the dough. The baker lights the oven.`

The corpus `tales` is tales of about a hundred words, written by a grammar: who the hero is, what was lost and who
helped are told at the beginning and decide words far below: `Mira the potter … gave the owl a round bowl.`

The corpus `induction` is random letters, three times in a row: `qXbTqXbTqXbT`. The task of the same name has pairs of
such texts in which one letter of the first copy differs, for `weft explain --only patch`.

The corpus `particles` is sentences of a small grammar, whose last word depends on the verb, several words before it:
`she turned the old radio near the door off .`

The corpus `senses` is the training sentences of the task of the same name, each with an ambiguous word:
`the duck swam to the bank among the reeds .`

A task has training rows and held-out rows, drawn from small grammars:

    for row in task_rows("dates", "train"): …        {"source": "3 May 1999", "target": "1999-05-03"}

The same name always gives the same rows. A hash of an item (a date, a number, a sentence) decides its split.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from weft.errors import DataError, suggestion
from weft.progress import bar
from weft.storage import files
from weft.storage.files import cache_folder, write_text
from weft.text.grammars import english_french, rewriting, sentences
from weft.text.grammars.rng import InSplit, Rng, Row

try:
    from pydoc_data.topics import topics
except ImportError:  # some distributions ship it separately; the docstrings remain
    topics = {}  # type: ignore[misc]

GENERATED = {  # corpora of small grammars: a document, and how many are drawn before repetitions are removed
    "induction": (rewriting.repeated_letters, 20_000),
    "particles": (sentences.phrasal_verb, 20_000),
    "stories": (sentences.story, 2000),
    "tales": (sentences.tale, 6000),
}
CORPORA = ("python", "senses", *GENERATED)
ABOUT = {  # kind and licence
    "python": "Python's own documentation, English about code, under Python's licence (PSF)",
    "tales": "tales of about a hundred words, written by a grammar that comes with weft (Apache 2.0)",
}
FORMAT = 1  # version of the cached file; increment it when the text below changes
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}


class BuiltinCorpus(NamedTuple):
    """Documents of a corpus, in a fixed order, and the sha256 that identifies them."""

    documents: list[str]
    sha256: str


def corpus(name: str) -> BuiltinCorpus:
    """Return a built-in corpus; `python` is assembled once, which takes some seconds, and then read from the cache."""
    name = name.removeprefix("builtin:")
    if name not in CORPORA:
        raise DataError(f"builtin:{name}: no such built-in corpus; {suggestion(name, CORPORA)}")
    if name in GENERATED:
        (draw, count), rng = GENERATED[name], Rng(f"weft {name}")
        return _identified(list(dict.fromkeys(draw(rng) for _ in range(count))))
    if name == "senses":
        return _identified([re.sub(r"[][]", "", row["text"]) for row in task_rows(name, "train")])
    sources = Path(sysconfig.get_path("stdlib"))
    # two Pythons of one version may ship different libraries, so the path of the sources is in the name
    path_hash = hashlib.sha256(str(sources).encode()).hexdigest()[:8]
    cache = cache_folder() / f"builtin-python-{platform.python_version()}-{path_hash}-{FORMAT}.json"
    try:
        documents = json.loads(files.read_text(cache))
    except (OSError, ValueError):
        documents = None
    if not (isinstance(documents, list) and documents and all(isinstance(text, str) for text in documents)):
        # the pages of `help("topics")`, chapters of the language reference; some pages have two names
        pages = (inspect.cleandoc(topics[name]) + "\n" for name in sorted(topics) if topics[name].strip())
        documents = list(dict.fromkeys(pages)) + _module_docstrings(sources)
        with contextlib.suppress(OSError):  # without a cache, the corpus is assembled again
            write_text(cache, json.dumps(documents, ensure_ascii=False))
    return _identified(documents)


def _identified(documents: list[str]) -> BuiltinCorpus:
    return BuiltinCorpus(documents, hashlib.sha256("\0".join(documents).encode()).hexdigest())


def _module_docstrings(sources: Path) -> list[str]:
    """Return a document for each module of the standard library: its docstrings under their qualified names."""
    files = sorted(file for file in sources.rglob("*.py") if not SKIPPED & set(file.relative_to(sources).parts))
    if not files:
        raise DataError(f"builtin:python: {sources} holds no Python sources; install them, or use another text")
    seen: set[str] = set()
    documents = []
    with bar("reading Python's documentation", len(files)) as advance:
        for file in files:
            module = ".".join(file.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
            parts = []
            for name, text in _docstrings(file):
                if text not in seen:  # some are copied between classes or modules
                    seen.add(text)
                    parts.append(f"{name or f'module {module}'}\n\n{text}\n")
            if parts:
                documents.append("\n".join(parts))
            advance(1)
    return documents


def _docstrings(file: Path) -> list[tuple[str, str]]:
    """Return (qualified name, docstring) of all definitions in a module; the module itself has an empty name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a source
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # not a valid source file
        return []

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield name, text.encode("utf-8", "replace").decode()  # may hold a lone surrogate
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from walk(child, f"{name}.{getattr(child, 'name', '')}".strip("."))

    return list(walk(tree, ""))


class Task(NamedTuple):
    """The grammar that draws a row of a task, and the number of rows of each split."""

    draw: Callable[[Rng, InSplit], Row | None]
    train: int = 20_000
    validation: int = 1_000
    held_out: Callable[[Rng, InSplit], Row | None] | None = None  # draws held-out rows, if another grammar does


TASKS = {
    "copy": Task(rewriting.copy),
    "reverse": Task(rewriting.reverse),
    "induction": Task(rewriting.repeated_pair, train=500, validation=500),
    "dates": Task(rewriting.words_to_date),
    "dates-back": Task(rewriting.date_to_words),
    "numbers": Task(rewriting.words_to_number),
    "numbers-back": Task(rewriting.number_to_words),
    "sentiment": Task(sentences.opinion),
    "questions": Task(sentences.question),
    "reports": Task(sentences.report),
    "senses": Task(sentences.sense, train=9_000, validation=180, held_out=sentences.held_out_sense),
    "number": Task(sentences.subject_number, train=2_000, validation=500),
    "tag": Task(sentences.tagged, train=2_000, validation=500),
    "depth": Task(sentences.bracket_depth, train=2_000, validation=500),
    "chatter": Task(sentences.conversation, train=10_000, validation=500),
    "english-french": Task(english_french.translation),
}
TASK_SOURCES = {f"builtin:{name}" for name in TASKS}


def task_rows(name: str, split: Literal["train", "validation"]) -> Iterator[Row]:
    """Yield the rows of one split of a task, all different, drawn once per process as far as they are read."""
    rows, drawn = _drawn(name, split)
    for index in itertools.count():
        if index == len(rows):
            row = next(drawn, None)
            if row is None:
                return
            rows.append(row)
        yield rows[index]


@functools.cache
def _drawn(name: str, split: Literal["train", "validation"]) -> tuple[list[Row], Iterator[Row]]:
    """Return a list for the rows drawn so far, and the iterator that draws the others."""
    return [], _draw_rows(name, split)


def _draw_rows(name: str, split: Literal["train", "validation"]) -> Iterator[Row]:
    task, held_out = TASKS[name], split == "validation"
    rng, draw = Rng(f"weft {name} {split}"), (held_out and task.held_out) or task.draw
    seen: set[str] = set()

    def in_split(key: str) -> bool:
        """Return whether an item is in this split; a fixed tenth of all items is held out."""
        digest = hashlib.sha256(f"{name}\0{key}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") % 10 == 0) == held_out

    while len(seen) < (task.validation if held_out else task.train):
        row = draw(rng, in_split)
        if row is not None and (text := json.dumps(row)) not in seen:
            seen.add(text)
            yield row
