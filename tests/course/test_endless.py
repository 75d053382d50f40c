"""A function that never ends is stopped, and the loop that it was in is named."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lectures.textbook.lecture import load_file
from tests.spread import spread

import weft
from weft.course import checker
from weft.course.exercises import attempts, exercise
from weft.workers import Children

HEAD = "import time\nimport torch\ndef warmup(step, d_model, warmup):\n"
HELPER = "def helper(n):\n    return n and helper(n - 1) + helper(n - 1)\n"
# what follows the head, and the lines that may be named
FORMS = [
    ("    while True:\n        step += 1\n", {4}),
    ("    n = 0\n    while n < step:\n        for k in range(3):\n            k += 1\n    return n\n", {5}),
    ("    def numbers():\n        while True:\n            yield 1\n    return max(numbers())\n", {5, 7}),
    ("    x = torch.ones(9)\n    for _ in range(10**9):\n        x = x.sin()\n    return x.sum()\n", {5}),
    ("    time.sleep(10**6)\n    return 1.0\n", {4}),
    ("    return helper(step + 99)\n" + HELPER, {6}),
    ("    while True:\n        try:\n            pass\n        except:\n            pass\n", {4}),
    ("    for _ in range(10**9):\n        helper(2)\n" + HELPER, {4, 7}),
    ("    return sum(k for k in range(10**12))\n", {4}),
    ("    while True:\n        helper(2)\n" + HELPER, {4, 7}),
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with attempts() as processes:
        yield processes


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("code", "lines"), spread(FORMS, keep=1))
def test_a_file_that_never_ends(children: Children, code: str, lines: set[int]) -> None:
    answer = checker.check_file(exercise("warmup"), HEAD + code, children, seconds=1)
    assert answer.passed == 0 and answer.line in lines, answer
    assert "more than 1 seconds and was still in the" in answer.problem and answer.text in code


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("code", "lines"), spread(FORMS, keep=1))
def test_a_function_that_never_ends(
    code: str, lines: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "SECONDS", 0.3)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "endless.py").write_text(HEAD + code)
    answer = weft.check(load_file(tmp_path / "endless.py", "endless").warmup, "warmup")
    assert answer.line in lines and "more than 0.3 seconds and was still in the" in answer.problem, answer


def test_a_recursion_without_end_is_an_error() -> None:
    def endless(step: float, d_model: int, warmup: int) -> float:
        return endless(step, d_model, warmup) + 1

    answer = weft.check(endless, "warmup")
    assert "RecursionError" in answer.problem and answer.text.startswith("return endless")


@pytest.mark.slow
def test_the_statement_at_fault_is_named_besides_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def bpe_encode(word: str, merges: list[tuple[str, str]]) -> list[str]:
        pieces, at = list(word), 0
        for pair in merges:
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == pair:
                    pieces[at : at + 2] = ["".join(pair)]
                at += 0
        return pieces

    monkeypatch.setattr(checker, "SECONDS", 0.3)
    answer = weft.check(bpe_encode, "bpe_encode")
    assert "in the loop “while at < len(pieces) - 1:”" in answer.problem
    assert answer.text == "at += 0" and "another value" in answer.repair, answer
