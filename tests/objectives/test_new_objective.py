"""A new objective is a settings class, a file and its entry in the table; no other file of the package is edited.

Ordinal regression, the example of docs/design/add-objective.md, is added to a copy of the package. Everything else,
from the head of the model to `weft train`, `weft evaluate` and the report, follows.
"""

import filecmp
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft

pytestmark = pytest.mark.slow  # test_table.py finds every objective, and test_objectives.py trains them

PAGE = Path(__file__).parents[2] / "docs/design/add-objective.md"
SETTINGS, OBJECTIVE = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
IMPORT, LINE = "from weft.objectives.grade import Grade\n", "    config.Grade: Grade,\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has the objective."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "weft"
    shutil.copytree(Path(weft.__file__).parent, copy)  # with __pycache__: compiling takes most of the time
    insert(copy / "recipe/objective.py", f"{SETTINGS}\n\n", before="OBJECTIVES = {")
    (copy / "objectives/grade.py").write_text(OBJECTIVE, encoding="utf-8")
    insert(copy / "objectives/table.py", IMPORT, before="from weft.objectives.masked import")
    insert(copy / "objectives/table.py", LINE, before="    config.Masked: Masked,\n")
    return folder


def insert(file: Path, text: str, before: str) -> None:
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before), encoding="utf-8")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose grade is that of one word."""
    words, pick = ["terrible", "weak", "decent", "lovely"], random.Random(0)
    graded = [pick.randrange(4) for _ in range(240)]
    lines = [f"the {pick.choice(['film', 'book', 'song'])} is {words[grade]}\t{grade + 1}" for grade in graded]
    file = tmp_path_factory.mktemp("rows") / "rows.tsv"
    file.write_text("\n".join(["text\tgrade", *lines]) + "\n", encoding="utf-8")
    return file


# print the exit code and the output of each command in a JSON list
COMMANDS = """
import contextlib, io, json, sys
from weft.cli.main import run
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
MODEL = ["model.layers=1", "model.d_model=32", "model.attention.heads=2", "model.feedforward.d_ff=32"]
SETTINGS_GIVEN = ["objective.grades=4", "steps=60", "batch.size=16", "batch.length=16", "optimizer.lr=0.01"]
MISTAKES = {
    "objective.grades=1": "objective.grades = 1: expected a number greater than or equal to 2",
    "evaluate.metric=within": "objective 'grade' has no such metric; did you mean 'within_one'?",
    "model=lstm": "model.kind = 'recurrent': objective 'grade' needs a model of kind encoder or decoder",
}


@pytest.fixture(scope="module")
def done(package: Path, rows: Path) -> list[list[Any]]:
    """The output of the copy's commands, run in one process, since most of the time is its start."""
    train = ["train", "bert-tiny", "--data", str(rows), "objective=grade"]
    commands = [
        [*train, "--run", "run", "tokenizer=word", *SETTINGS_GIVEN, *MODEL],
        ["evaluate", "run", "--json"],
        ["evaluate", "run", "--data", str(rows)],
        ["classify", "run", str(rows), "--json"],
        ["train", "--resume", "run"],
        *([*train, word] for word in MISTAKES),
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def differences(compared: filecmp.dircmp[str], below: str = "") -> set[str]:
    """Return the files in which two folders differ."""
    here = {below + name for name in (*compared.diff_files, *compared.left_only, *compared.right_only)}
    return here.union(*(differences(inner, f"{below}{name}/") for name, inner in compared.subdirs.items()))


def test_two_files_are_edited_and_one_is_new(package: Path) -> None:
    found = filecmp.dircmp(Path(weft.__file__).parent, package / "weft", ignore=["__pycache__"])
    assert differences(found) == {"recipe/objective.py", "objectives/grade.py", "objectives/table.py"}


def test_it_is_learned_measured_and_resumed(package: Path, done: list[list[Any]]) -> None:
    trained, evaluated, elsewhere, used, resumed, *_ = done
    code, out, err = trained
    assert code == 0, err
    assert "a model that has learned nothing has a loss of 2.08" in err  # 3 · ln 2
    for shown in ("accuracy", "within one", "use       weft classify run < lines.txt"):
        assert shown in out
    assert (package / "run/report.html").exists()

    code, out, err = evaluated
    assert code == 0, err
    metrics = json.loads(out)
    assert metrics["loss"] < 1.0
    assert metrics["within_one"] > 0.9
    assert 0.5 < metrics["accuracy"] <= metrics["within_one"]
    assert elsewhere[0] == 0 and "within one" in elsewhere[1]
    predicted = [json.loads(line)["grade"] for line in used[1].splitlines()]
    assert len(predicted) == 240 and set(predicted) <= {1, 2, 3, 4}
    assert resumed[0] == 0, resumed[2]


def test_its_mistakes_are_one_line(done: list[list[Any]]) -> None:
    for (code, _, err), line in zip(done[-len(MISTAKES) :], MISTAKES.values(), strict=True):
        assert code == 2
        assert line in err and err.count("\n") == 1
