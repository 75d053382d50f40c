"""Submissions that misbehave get their mark, and cannot change another's."""

import json
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.command import Cli
from tests.spread import spread

from weft.course.calls import CallResult, Case
from weft.course.cases import draw_cases
from weft.course.checker import check_file, examine
from weft.course.exercises import FOLDER, attempts, exercise, source_of
from weft.course.explanation import Explanation
from weft.course.grades import Submission, grade, submissions, write_grades
from weft.errors import DataError
from weft.workers import Children

WARMUP = "def warmup(step, d_model, warmup):\n    {}return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)\n"
RIGHT = WARMUP.format("")
RENAME = """\
import ctypes, os
name = os.uname()[1].encode()  # the machine's own, so that nothing changes where it is allowed
assert not ctypes.CDLL(None).sethostname(name, len(name)), "refused"
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
MISBEHAVIOUR = [
    ("import os\nos._exit(3)\n" + RIGHT, "exit status 3"),
    (WARMUP.format("import os; os._exit(0); "), "exit status 0"),
    ("import sys\nsys.exit(1)\n", "SystemExit"),
    ("import torch\nx = torch.zeros(50 << 30, dtype=torch.uint8)\n", "memory"),
    ("x = bytearray(50 << 30)\n", "MemoryError"),
    ("import os\nos.fork()\n", "not allowed"),
    ("import ctypes\nassert ctypes.CDLL(None).fork() >= 0, 'refused'\n", "refused"),
    ("import subprocess\nsubprocess.run(['ls'])\n", "not allowed"),
    ("import socket\nsocket.create_connection(('127.0.0.1', 9))\n", "not allowed"),
    ("open('/tmp/weft-outside', 'w')\n", "outside the folder"),
    ("import shutil\nshutil.rmtree('/home')\n", "outside the folder"),
    ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n", "not allowed"),
    ("import os\nopen(f'/proc/{os.getppid()}/cmdline')\n", "not allowed"),  # which contains --secret
    ("import os, torch\ntorch.from_file(f'/proc/{os.getppid()}/cmdline', size=9)\n", "Permission denied"),
    ("import os\nraise ValueError(os.environ.get('MY_SECRET'))\n", "ValueError: None"),
    (RENAME, "refused"),
    ("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (1, 1))\n", "not allowed"),
    ("for i in range(99):\n    open(f'f{i}', 'wb').write(bytes(1 << 23))\nwhile True:\n    pass\n", "too much"),
    ("import weft\nopen(weft.__file__[:-11] + 'exercises/warmup/reference.py')\n", "solutions is not allowed"),
    ("def warmup(:\n", "line 1: SyntaxError"),
    ("def other():\n    pass\n", "no function warmup"),
    (WARMUP.format("1 / 0; "), "line 2: ZeroDivisionError"),
    (WARMUP.format("return float('nan'); "), "rate contains NaN"),
    (WARMUP.format("return 10**10**4; "), "result cannot be read"),
    (WARMUP.format("yield 1; "), "expected float, got generator"),
]


def run(children: Children, code: str) -> str:
    answer = check_file(exercise("warmup"), code, children)
    assert not answer.holds and answer.passed == 0
    return answer.problem


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SECRET", "seed")
        with attempts() as processes:
            yield processes


@pytest.fixture(scope="module")
def weak_children() -> Iterator[Children]:
    missing = "import weft.course.confine as c; c._landlock = c._seccomp = lambda *_: False\n"
    command = (sys.executable, "-c", missing + "from weft.course import attempt; attempt.main()")
    with closing(Children(command, {"OMP_NUM_THREADS": "1"})) as processes:
        yield processes


@linux
@pytest.mark.parametrize(("code", "problem"), spread(MISBEHAVIOUR, keep=8))
def test_misbehaviour_is_named_and_contained(children: Children, code: str, problem: str) -> None:
    assert problem in run(children, code)
    assert check_file(exercise("warmup"), RIGHT, children).holds  # the same process, afterwards


@linux
def test_native_code_cannot_write_outside(children: Children, tmp_path: Path) -> None:
    place = tmp_path / "outside"
    code = f"import ctypes\nassert ctypes.CDLL(None).open({str(place).encode()!r}, 65, 0o600) >= 0, 'refused'\n"
    assert "refused" in run(children, code)
    assert not place.exists()


@linux
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import ctypes\nctypes.CDLL(None)\n", "ctypes.dlopen is not allowed"),
        ("open('/tmp/weft-outside', 'w')\n", "outside the folder"),
        ("import socket\nsocket.socket()\n", "not allowed"),
        ("import os\nos.fork()\n", "not allowed"),
        ("import weft\nopen(weft.__file__[:-11] + 'exercises/warmup/reference.py')\n", "solutions is not allowed"),
    ],
)
def test_limits_without_the_kernel(weak_children: Children, code: str, problem: str) -> None:
    """Without seccomp and Landlock, as on macOS, audit hooks refuse it, and the answer says what that leaves open."""
    answer = check_file(exercise("warmup"), code, weak_children)
    assert problem in answer.problem
    assert answer.weak == ("files outside the folder", "network and new processes")
    assert check_file(exercise("warmup"), RIGHT, weak_children).holds


@linux
def test_an_endless_loop_ends(children: Children) -> None:
    loop = "while True:\n    pass\n"
    answer = check_file(exercise("warmup"), loop, children, seconds=1)
    assert "more than 1 seconds" in answer.problem and answer.text == "while True:"
    assert "in the case" not in answer.problem  # the file is not loaded yet


def test_what_it_prints_and_deletes_does_not_matter(children: Children, tmp_path: Path) -> None:
    loud = "print('x' * 1_000_000); print('y' * 1_000_000)\nimport os, sys\nos.remove(__file__)\n" + RIGHT
    assert check_file(exercise("warmup"), loud, children).holds
    with_check = RIGHT + "import weft\nprint(weft.check(warmup, 'warmup'))\n"
    (tmp_path / "warmup.py").write_text(with_check)
    assert check_file(exercise("warmup"), source_of(tmp_path / "warmup.py"), children).holds
    meddling = "import weft.course.cases as c, weft.course.values as v\nv.gap = c.judge = lambda *_: 0\n"
    answer = check_file(exercise("warmup"), meddling + "def warmup(step, d_model, warmup):\n    return 1.0\n", children)
    assert answer.passed == 0
    assert check_file(exercise("warmup"), RIGHT, children).holds


@pytest.mark.slow
def test_a_class_is_graded_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    for student, code in {
        "ann": RIGHT,
        "bob": RIGHT.replace("min(", "max("),
        "=cy": "import os\nos._exit(1)\n",
    }.items():
        (folder / student).mkdir(parents=True)
        (folder / student / "warmup.py").write_text(code)
    (folder / "ann" / "sinusoids.py").write_text(exercise("sinusoids").starting_file())
    (folder / "dan").mkdir()
    done: list[int] = []
    grades = grade(submissions(folder, []), "secret", done.append)
    points = {(each.student, each.exercise.name): each.points for each in grades}
    assert len(points) == len(done) == 8
    assert points["ann", "warmup"] == 100 and points["ann", "sinusoids"] == 0 and points["dan", "warmup"] == 0
    assert points["bob", "warmup"] < 100 and points["=cy", "warmup"] == 0
    for name in ("grades.csv", "results.json", "grades.html"):
        write_grades(grades, tmp_path / name)
    rows = (tmp_path / "grades.csv").read_text().splitlines()
    assert rows[0].startswith("student,total,") and any(row.startswith("'=cy") for row in rows)
    assert "max instead of min" in rows[2] or "max instead of min" in rows[3]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["ann"]["score"] == 50.0 and results["ann"]["tests"][0]["max_score"] == 100
    assert "Grades" in (tmp_path / "grades.html").read_text()
    with pytest.raises(DataError, match="ends in"):
        write_grades(grades, tmp_path / "grades.txt")


@pytest.mark.slow
def test_grades_are_the_same_every_time(tmp_path: Path) -> None:
    for student, code in {"ann": RIGHT, "bob": RIGHT.replace("min(", "max("), "cy": "while True:\n    pass\n"}.items():
        (tmp_path / student).mkdir()
        (tmp_path / student / "warmup.py").write_text(code)
    one, other = (grade(submissions(tmp_path, []), "secret", lambda _: None, seconds=1) for _ in range(2))
    assert [str(each.answer) for each in one] == [str(each.answer) for each in other]


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    cli = Cli(capsys)
    assert "flash" in cli("exercise")
    cli("exercise", "start", "warmup")
    assert "exists already" in cli.refused("exercise", "start", "warmup")
    assert "did you mean 'warmup'" in cli.refused("exercise", "start", "warmp")
    cli("exercise", "start", "warmup", "--notebook")
    notebook = json.loads(Path("warmup.ipynb").read_text())
    notebook["cells"][1]["source"] = [*RIGHT.splitlines(keepends=True), "%timeit 1\n"]
    Path("warmup.ipynb").write_text(json.dumps(notebook))
    assert "min(step" in source_of(Path("warmup.ipynb")) and "weft.check" not in source_of(Path("warmup.ipynb"))
    assert "right, in all" in cli("exercise", "check", "warmup.ipynb")
    assert cli.json("exercise")[0]["lecture"] == 1
    assert "✓" in cli("exercise")
    cli("exercise", "pack", "warmup", "attention", "--out", "course.zip")
    names = zipfile.ZipFile("course.zip").namelist()
    assert "course/attention.py" in names and not any("reference" in name for name in names)
    own = tmp_path / "own"
    (own / "mine").mkdir(parents=True)
    for file in (FOLDER / "warmup").iterdir():
        if file.is_file():
            (own / "mine" / file.name).write_text(file.read_text().replace("def warmup(", "def mine("))
    cli("exercise", "pack", "mine", "--exercises", own, "--with-checks", "--out", "own.zip")
    assert "course/exercises/mine/reference.py" in zipfile.ZipFile("own.zip").namelist()
    Path("mine.py").write_text(RIGHT.replace("def warmup(", "def mine("))
    assert cli.json("exercise", "check", "mine.py", "--exercises", own)["right"]
    (tmp_path / "class" / "ann").mkdir(parents=True)
    (tmp_path / "class" / "ann" / "warmup.py").write_text(RIGHT)
    assert [row["points"] for row in cli.json("exercise", "grade", "class")] == [100.0]
    assert "no such folder" in cli.refused("exercise", "grade", "nowhere")
    assert os.path.exists("own.zip")


def test_a_submission_is_a_file_of_code(tmp_path: Path) -> None:
    (tmp_path / "warmup.py").write_bytes(b"\xff\xfe")
    (tmp_path / "adamw.py").mkdir()
    with (tmp_path / "mle.py").open("wb") as file:
        file.truncate(200 << 20)
    for name, problem in {"warmup": "not UTF-8", "adamw": "directory", "mle": "the limit is"}.items():
        with pytest.raises(DataError, match=problem):
            source_of(tmp_path / f"{name}.py")


def test_grades_of_nothing_are_zero() -> None:
    forbidden = Explanation("mle", "", 4, 4, problem="its loops grow")
    assert Submission("a", exercise("mle"), None, forbidden).points == 0


def test_a_process_never_knows_what_a_secret_case_expects() -> None:
    sent = list[Case]()

    def calls(cases: Sequence[Case]) -> list[CallResult]:
        sent.extend(each for each in cases if each.expected)
        return [CallResult(value=0.0)] * len(cases)

    assert not examine(exercise("warmup"), calls, secret="winter").holds
    known = [each.arguments for each in draw_cases(exercise("warmup"), "")]
    assert sent and all(each.arguments in known for each in sent)
