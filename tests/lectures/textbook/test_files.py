"""Every file of lectures/ is self-contained: short, typed, and importing neither weft nor another file."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "lectures").glob("*.py"))
MAX_LINES = 200
STANDARD_LIBRARY_ONLY = {"ngram", "backprop"}
every_file = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


def imported(file: Path) -> set[str]:
    """Packages that a file imports, also inside functions; "." for a relative import."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").partition(".")[0])
    return found


def test_there_are_files() -> None:
    assert {"ngram", "backprop", "bpe", "rnn", "bahdanau", "decoding"} <= {file.stem for file in FILES}


@every_file
def test_it_is_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@every_file
def test_it_imports_the_standard_library_and_torch(file: Path) -> None:
    allowed = set(sys.stdlib_module_names) | (set() if file.stem in STANDARD_LIBRARY_ONLY else {"torch"})
    others = {other.stem for other in FILES}
    assert not imported(file) & others, "no file needs another"
    assert imported(file) <= allowed


@every_file
def test_it_loads_no_code_dynamically(file: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"__import__", "exec", "eval", "import_module"}


@every_file
def test_its_docstring_has_the_command_and_the_figure(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    assert f"python lectures/{file.name}" in text
    assert any(character.isdigit() for character in text), "a figure"


@every_file
def test_every_function_has_types(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            returns = node.returns is not None or node.name == "__init__"
            assert returns and not untyped, f"{file.name}:{node.lineno} {node.name}{untyped}"


@pytest.mark.slow
@every_file
def test_a_wrong_path_is_one_line(file: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "none.txt")
    done = subprocess.run([sys.executable, file, path], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert path in done.stderr


def test_lint_reads_them() -> None:
    """`make lint` runs ruff on the whole tree, and mypy on the paths in its settings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert "lectures" in settings["mypy"]["files"]
    assert not any("lectures" in path for path in settings["ruff"].get("extend-exclude", []))


def test_ruff_finds_nothing() -> None:
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "lectures"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "lectures"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
