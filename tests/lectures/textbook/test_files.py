"""Every file of lectures/ is self-contained: short, typed, and importing neither weft nor another file."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
from tests.lectures.textbook.lecture import assert_refused, load, run

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


@every_file
def test_it_imports_the_standard_library_and_torch(file: Path) -> None:
    allowed = set(sys.stdlib_module_names) | (set() if file.stem in STANDARD_LIBRARY_ONLY else {"torch"})
    others = {other.stem for other in FILES}
    assert not imported(file) & others, "no file needs another"
    assert imported(file) <= allowed


@every_file
def test_it_loads_no_code_dynamically(file: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & {"__import__", "exec", "eval", "import_module"}


@every_file
def test_it_is_short_and_its_docstring_has_the_command_and_the_figure(file: Path) -> None:
    code = file.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= MAX_LINES
    text = ast.get_docstring(ast.parse(code)) or ""
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


WRONG_FILES: dict[str, list[tuple[bytes, str]]] = {  # contents and problem
    "ngram": [(b"only a few words", "at least 100")],
    "backprop": [(b"a,b\n", "could not convert"), (b"", "expected rows of numbers")],
    "bpe": [("Grüße".encode("latin-1"), "utf-8")],
    "rnn": [(b"short", "at least 5,000 characters")],
    "bahdanau": [(b"a cow\tune vache\n", "at least 320")],
    "transformer": [(b"a\tb\n", "at least 500 lines"), (b"no tab\n" * 1000, "at least 500 lines")],
    "bert": [(b"One sentence. Another.\n", "at least 500 paragraphs")],
    "gpt": [(b"too short", "too few"), (b"\x89PNG\xff", "utf-8")],
    "megatron": [(b"too short", "too few")],
}


@every_file
def test_a_wrong_file_is_one_line(file: Path, tmp_path: Path) -> None:
    module = load(file.stem)
    assert_refused(module, tmp_path / "absent.txt", "No such file or directory")
    assert_refused(module, tmp_path, "Is a directory")
    for contents, problem in WRONG_FILES.get(file.stem, []):
        (tmp_path / "wrong.txt").write_bytes(contents)
        assert_refused(module, tmp_path / "wrong.txt", problem)


BOOK = "\n".join(["le", "chat", "mange", "une", "souris", "🐭", "."] * 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), [*product(["bpe", "decoding"], ["", "x", "日本語 \n" * 50]), ("ngram", BOOK)]
)
def test_it_reads_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(text)
    code, _, err = run(name, str(tmp_path / "book.txt"))
    assert (code, err) == (0, "")


# patterns of the numbers in the docstring's figure and in the output, with their tolerances
LOSS, ENTROPY = r"(?:the loss is|unseen text:) (\d\.\d+)", r"entropy (?:is|of the grammar:) (\d\.\d+)"
FIGURES: dict[str, dict[str, dict[str, float]]] = {
    "ngram": {
        r"(\d\.\d+)(?: at N = 6| with)": {"rel": 0.005},
        r"grammar's (?:is|perplexity:) (\d\.\d+)": {"rel": 0.005},
    },
    "backprop": {r"(\d) of 4": {"rel": 0}, r"mean cross-entropy (?:of )?(\d\.\d+)": {"rel": 0.01}},
    "bpe": {r"(\d\.\d+) bytes per token": {"rel": 0.005}},
    "rnn": {r"held-out loss (?:of )?(\d\.\d+)": {"rel": 0.05}, r"entropy (?:is )?(\d\.\d+)": {"rel": 0.005}},
    "bahdanau": {r"(\d+) %": {"rel": 0.02}},
    "decoding": {r"(\d\.\d+) tokens": {"rel": 0.05}},
    "transformer": {r"(?:it writes|without a mistake:) ([\d.]+) %": {"abs": 2.0}},
    "bert": {r"([\d.]+) ?% (?:of 500|are labelled)": {"abs": 5}},
    "gpt": {LOSS: {"abs": 0.02}, ENTROPY: {"abs": 0.02}},
    "llama": {LOSS: {"abs": 0.02}, ENTROPY: {"abs": 0.02}},
    "megatron": {r"(?:reaches|step  200  loss) (\d\.\d+)": {"abs": 0.05}},
}
OUTPUT = {
    "bahdanau": "█",
    "bpe": r"henry\|is\|giv\|##in\|'\|a\|lec\|##true\|on\|transform\|##ers",
    "llama": "keys and values of 2 heads, for 4 heads of queries",
    "megatron": r"2 forward, 2 backward[\s\S]*2 forward, 2 backward",
}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@every_file
def test_its_figure(file: Path) -> None:
    code, out, err = run(file.stem)
    assert (code, err) == (0, "") and re.search(OUTPUT.get(file.stem, ""), out)
    stated, last = (load(file.stem).__doc__ or "").partition("Figure:")[2], []
    for pattern, tolerance in FIGURES[file.stem].items():
        expected, found = re.search(pattern, stated), [float(number) for number in re.findall(pattern, out)]
        assert expected and found, f"{pattern} in {stated} and {out}"
        assert found[-1] == pytest.approx(float(expected[1]), **tolerance)  # type: ignore[arg-type]
        assert file.stem != "megatron" or found[0] == pytest.approx(found[1], abs=0.01)  # one process and two
        last.append(found[-1])
    assert last == sorted(last, reverse=True)  # no loss is below the entropy


def test_lint_reads_them() -> None:
    """`make lint` runs ruff on the whole tree, and mypy on the paths in its settings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert "lectures" in settings["mypy"]["files"]
    assert not any("lectures" in path for path in settings["ruff"].get("extend-exclude", []))


def test_ruff_finds_nothing() -> None:
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        ruff = [sys.executable, "-m", "ruff", *command, "lectures"]
        done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "lectures"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
