"""Grades of a class: every submission of a folder, checked with hidden cases; as CSV, Gradescope's JSON and a page."""

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from weft.course.checker import AttemptLimits, check_file
from weft.course.exercises import Exercise, attempts, exercises, source_of
from weft.course.explanation import Explanation
from weft.errors import DataError, WeftError, counted
from weft.figures.page import Section, html_table, page, part
from weft.figures.tables import Table
from weft.progress import Advance
from weft.storage.files import write_text
from weft.workers import Children, cores

SUFFIXES = (".py", ".ipynb")
MAX_POINTS = 100


class Submission(NamedTuple):
    """File that a student submitted for an exercise; None if there is none."""

    student: str
    exercise: Exercise
    path: Path | None


class Grade(NamedTuple):
    """Result of a submission."""

    submission: Submission
    answer: Explanation

    @property
    def points(self) -> float:
        """Share of the cases that are right, of 100 points; none for a solution that is right but forbidden."""
        share = self.answer.passed / max(self.answer.cases, 1)
        return round(MAX_POINTS * share, 1) if self.answer.holds or share < 1 else 0.0


def submissions(folder: Path, chosen: Sequence[Exercise], own: Path | None = None) -> list[Submission]:
    """Find the submissions: a folder for each student with files named like exercises, or a single student's files.

    Without `chosen`, the exercises are those for which anybody submitted a file, also of the folder `own`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected a folder for each student")
    single = any(path.suffix in SUFFIXES for path in folder.iterdir() if path.is_file())
    students = [folder] if single else sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    files = {student: _files(student) for student in students}
    wanted = chosen or [each for each in exercises(own).values() if any(each.name in found for found in files.values())]
    if not wanted:
        raise DataError(f"{folder}: no submissions; expected files such as STUDENT/attention.py")
    return [Submission(student.name, each, found.get(each.name)) for student, found in files.items() for each in wanted]


def _files(student: Path) -> dict[str, Path]:
    paths = [path for path in sorted(student.rglob("*")) if path.suffix in SUFFIXES and not path.is_symlink()]
    return {path.stem.replace("-", "_"): path for path in reversed(paths)}


def grade(found: Sequence[Submission], secret: str, advance: Advance, *, seconds: int = 10) -> list[Grade]:
    """Check all submissions, several at the same time; none can stop the others.

    Each has `seconds` of CPU time for an exercise.
    """
    limits = AttemptLimits(seconds=seconds)

    def check(submission: Submission) -> Grade:
        answer = _check(submission, secret, children, limits=limits)
        advance(1)
        return Grade(submission, answer)

    with attempts() as children, ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(check, found))


def _check(submission: Submission, secret: str, children: Children, *, limits: AttemptLimits) -> Explanation:
    chosen = submission.exercise
    missing = Explanation(chosen.name, chosen.title, 0, 1)
    if submission.path is None:
        return missing._replace(problem="nothing was submitted")
    try:
        return check_file(chosen, source_of(submission.path), children, secret=secret, limits=limits)
    except WeftError as error:
        return missing._replace(problem=str(error))
    except Exception as error:  # whatever a submission answers, the others are graded
        return missing._replace(problem=f"it cannot be checked: {type(error).__name__}: {error}")


def write_grades(grades: Sequence[Grade], path: Path) -> None:
    """Write grades in the format that the name ends with: .csv, .json (Gradescope's results.json) or .html."""
    formats = {".csv": _csv, ".json": _gradescope, ".html": _page}
    if path.suffix not in formats:
        raise DataError(f"{path}: expected a name that ends in .csv, .json or .html")
    try:
        write_text(path, formats[path.suffix](grades))
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def _by_student(grades: Sequence[Grade]) -> dict[str, list[Grade]]:
    students: dict[str, list[Grade]] = {}
    for each in grades:
        students.setdefault(each.submission.student, []).append(each)
    return students


def total(grades: Sequence[Grade]) -> float:
    """Mean points of a student's exercises."""
    return round(sum(each.points for each in grades) / len(grades), 1)


def _csv(grades: Sequence[Grade]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = list(dict.fromkeys(each.submission.exercise.name for each in grades))
    writer.writerow(["student", "total", *names, *(f"{name}: problem" for name in names)])
    for student, own in _by_student(grades).items():
        problems = [" ".join((each.answer.mistake or each.answer.problem).split()) for each in own]
        safe = [re.sub(r"^(?=[=+@-])", "'", text) for text in (student, *problems)]  # no formulas
        writer.writerow([safe[0], total(own), *(each.points for each in own), *safe[1:]])
    return file.getvalue()


def _gradescope(grades: Sequence[Grade]) -> str:
    """Return results.json; for several students an object of them."""
    results: dict[str, Any] = {}
    for student, own in _by_student(grades).items():
        tests = [
            {"name": e.answer.title, "score": e.points, "max_score": MAX_POINTS, "output": str(e.answer)} for e in own
        ]
        results[student] = {"score": total(own), "tests": tests}
    value = next(iter(results.values())) if len(results) == 1 else results
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def grade_table(grades: Sequence[Grade]) -> Table:
    """Return the points by student and exercise."""
    students = _by_student(grades)
    names = [each.submission.exercise.name for each in next(iter(students.values()))]
    rows = [(student, f"{total(own):g}", *(f"{each.points:g}" for each in own)) for student, own in students.items()]
    return Table(("student", "total", *names), rows)


def _page(grades: Sequence[Grade]) -> str:
    students = _by_student(grades)
    sections = [Section("Points", f"Of {MAX_POINTS} per exercise.", html_table(grade_table(grades), row_names=True))]
    for student, own in students.items():
        wrong = [each for each in own if not each.answer.holds]
        html = part("texts", [str(each.answer) for each in wrong]) if wrong else part("lead", "Everything is right.")
        sections.append(Section(student, f"{total(own):g} points", html))
    counts = f"{counted(len(students), 'student')}, {counted(len(grades), 'submission')}."
    return page("Grades", sections, summary=counts)


def weak_limits(grades: Sequence[Grade]) -> str:
    """Say which limits this system does not enforce; empty if it enforces all."""
    weak = sorted({each for grade in grades for each in grade.answer.weak})
    system = os.uname().sysname if hasattr(os, "uname") else "Windows"
    return f"not enforced by {system}'s kernel here: {', '.join(weak)}" if weak else ""
