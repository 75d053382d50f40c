"""Plain words, held: docstrings stand alone, no phrase has to be read twice, a class name stands for one thing, and
parameters beyond the third are named by the caller."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.sources import MODULES, PACKAGE, nodes

ROOT = Path(__file__).parent.parent
SCRIPTS = ["benchmarks", "lectures", "docs", "docs/ext"]  # folders of Python outside the package

# A docstring that begins with one of these leans on its neighbour, or hides what is returned.
LEANING = re.compile(r"(The same|Those|That|These|This|What|As|How|So|Such|It|Its|Inside|Likewise|Where|Of)\b")
PHRASES = re.compile(
    r"\bso many\b|\bthe same\.|\bbe they\b|\bbe it\b|\bof which the last\b|\bas above\b|\bfor a while\b"
    r"|\bno number\b(?! of)|\bword (?:head|loss)\b|\bnormed\b|\bLONGEST\b|\bLARGEST\b",
    re.IGNORECASE,
)
CASED = {"LONGEST", "LARGEST"}  # fine as ordinary words, not as names of constants
TEXTS = ("*.py", "*.toml", "*.js", "*.css", "*.html", "*.c", "*.h", "*.md", "*.ipynb")

# Names that settings and what they build share, and a few that nobody could confuse.
SHARED_NAMES: set[str] = set()
# Signatures that a library fixes, or kernels whose arguments are pointers, strides and sizes.
MAX_PARAMETERS = 8
MAX_POSITIONAL = 3
FIXED_SIGNATURES = (
    *("nn/kernels/", "decode/fast/attend.py", "decode/fast/chunks.py", "decode/fast/kernels", "cli/"),
    "exercises/",  # of the functions that students write
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def leaning(paths: Iterable[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        for line, text in docstrings(path)
        if LEANING.match(text)
    ]


def test_docstrings_stand_alone() -> None:
    scripts = [path for folder in SCRIPTS for path in sorted((ROOT / folder).glob("*.py"))]
    found = leaning([*MODULES, *scripts])
    assert scripts and not found, "\n" + "\n".join(found)


def phrases(folder: Path) -> list[str]:
    found = []
    for path in [folder] if folder.is_file() else sorted(path for pattern in TEXTS for path in folder.rglob(pattern)):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for match in PHRASES.finditer(line):
                if match[0].upper() not in CASED or match[0] in CASED:
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}: {line.strip()[:120]}")
    return found


FOLDERS = sorted(PACKAGE / name for name in {path.name for path in PACKAGE.iterdir()} - {"site", "__pycache__"})
FOLDERS += [ROOT / name for name in ("docs", "lectures", "benchmarks")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_phrase_has_to_be_read_twice(folder: Path) -> None:
    found = phrases(folder)
    assert not found, "\n" + "\n".join(found)


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: where for name, where in places.items() if len(where) > 1 and not settings_and_built(where)}
    assert set(twice) <= SHARED_NAMES, "\n" + "\n".join(f"{name}: {where}" for name, where in sorted(twice.items()))


def settings_and_built(where: list[str]) -> bool:
    """Whether one of two classes is a config type and the other the part that it describes."""
    configs = [path for path in where if Path(path).stem.endswith("config") or path.startswith("recipe/")]
    return len(where) == 2 and len(configs) == 1


def test_parameters_are_in_the_open() -> None:
    found = []
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if path.relative_to(PACKAGE).as_posix().startswith(FIXED_SIGNATURES):
            continue
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
                positional = positional[positional[:1] in (["self"], ["cls"]) :]
                fixed = positional[:1] == ["ctx"] or node.name == "__torch_dispatch__"  # signatures of torch
                every = len(positional) + len(node.args.kwonlyargs)
                if not fixed and (len(positional) > MAX_POSITIONAL or every > MAX_PARAMETERS):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(f"{where}: {node.name}({', '.join(positional)}), {every} in all")
            if (
                isinstance(node, ast.Name) and node.id == "Unpack" and room != "api"
            ):  # there it shows settings to editors
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: Unpack hides parameters")
    assert not found, "\n" + "\n".join(found)
