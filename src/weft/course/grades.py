"""Grades of a class: every submission of a folder, checked with hidden cases; as CSV, Gradescope's JSON and a page."""

import csv
import io
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from weft.course.checker import check_file
from weft.course.exercises import Exercise, attempts, exercises, source_of
from weft.course.explanation import Explanation
from weft.errors import DataError, WeftError, counted, os_errors
from weft.figures.page import Section, html_table, page, part
from weft.figures.tables import Table
from weft.progress import Advance
from weft.storage.files import write_text
from weft.workers import cores

SUFFIXES = (".py", ".ipynb")
MAX_POINTS = 100


class Submission(NamedTuple):
    """File that a student submitted for an exercise, None if there is none, and the answer once it is graded."""

    student: str
    exercise: Exercise
    path: Path | None
    answer: Explanation

    @property
    def points(self) -> float:
        """Share of the cases that are right, of 100 points; none for a solution that is right but forbidden."""
        share = self.answer.passed / max(self.answer.cases, 1)
        return round(MAX_POINTS * share, 1) if self.answer.holds or share < 1 else 0.0


Students = dict[str, list[Submission]]


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
    missing = {each: Explanation(each.name, each.title, problem="nothing was submitted") for each in wanted}
    names = {student: os.fsencode(student.name).decode("utf-8", "backslashreplace") for student in students}
    return [Submission(names[s], each, files[s].get(each.name), missing[each]) for s in students for each in wanted]


def _files(student: Path) -> dict[str, Path]:
    paths = [path for path in sorted(student.rglob("*")) if path.suffix in SUFFIXES and not path.is_symlink()]
    return {path.stem.replace("-", "_"): path for path in reversed(paths)}


def grade(found: Sequence[Submission], secret: str, advance: Advance, *, seconds: int = 10) -> list[Submission]:
    """Check all submissions, several at the same time; none can stop the others.

    Each has `seconds` of CPU time for an exercise.
    """

    def check(each: Submission) -> Submission:
        answer = each.answer
        try:
            if each.path is not None:
                source = source_of(each.path)
                answer = check_file(each.exercise, source, children, secret=secret, seconds=seconds)
        except Exception as error:  # whatever a submission answers, the others are graded
            what = "" if isinstance(error, WeftError) else f"it cannot be checked: {type(error).__name__}: "
            answer = answer._replace(problem=f"{what}{error}")
        advance(1)
        return each._replace(answer=answer)

    with attempts() as children, ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(check, found))


def format_of(path: Path) -> Callable[[Students], str]:
    """Return what writes grades as the name ends: .csv, .json (Gradescope's results.json) or .html."""
    if path.suffix not in FORMATS:
        raise DataError(f"{path}: expected a name that ends in .csv, .json or .html")
    return FORMATS[path.suffix]


def write_grades(grades: Sequence[Submission], path: Path) -> None:
    """Write grades in the format that the name ends with."""
    with os_errors(path, verb="written"):
        write_text(path, format_of(path)(by_student(grades)))


def by_student(grades: Sequence[Submission]) -> Students:
    return {student: list(own) for student, own in groupby(grades, lambda each: each.student)}


def _total(grades: Sequence[Submission]) -> float:
    """Mean points of a student's exercises."""
    return round(sum(each.points for each in grades) / len(grades), 1)


def _csv(students: Students) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [each.exercise.name for each in next(iter(students.values()))]
    writer.writerow(["student", "total", *names, *(f"{name}: problem" for name in names)])
    for student, own in students.items():
        texts = (" ".join(text.split()) for text in (student, *(e.answer.mistake or e.answer.problem for e in own)))
        safe = [re.sub(r"^(?=[=+@-])", "'", text) for text in texts]  # no formulas
        writer.writerow([safe[0], _total(own), *(each.points for each in own), *safe[1:]])
    return file.getvalue()


def _gradescope(students: Students) -> str:
    """Return results.json, without expected values; for several students an object of them."""

    def test(each: Submission) -> dict[str, Any]:
        output = str(each.answer._replace(expected=None))
        return {"name": each.exercise.title, "score": each.points, "max_score": MAX_POINTS, "output": output}

    results = {student: {"score": _total(own), "tests": list(map(test, own))} for student, own in students.items()}
    value = results if len(results) > 1 else next(iter(results.values()))
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def grade_table(students: Students) -> Table:
    """Return the points by student and exercise."""
    names = [each.exercise.name for each in next(iter(students.values()))]
    rows = [(student, f"{_total(own):g}", *(f"{each.points:g}" for each in own)) for student, own in students.items()]
    return Table(("student", "total", *names), rows)


def _page(students: Students) -> str:
    sections = [Section("Points", f"Of {MAX_POINTS} per exercise.", html_table(grade_table(students), row_names=True))]
    folds, count = Markup(), sum(map(len, students.values()))
    for student, own in students.items():
        if wrong := [Markup(each.answer._repr_html_()) for each in own if not each.answer.holds]:
            folds += part("fold", f"{student}: {len(wrong)} of {len(own)} not right", Markup().join(wrong))
    sections += [Section("Answers", "What is not right, by student.", folds)] if folds else []
    return page("Grades", sections, summary=f"{counted(len(students), 'student')}, {counted(count, 'submission')}.")


FORMATS = {".csv": _csv, ".json": _gradescope, ".html": _page}


def weak_limits(answers: Sequence[Explanation]) -> str:
    """Say which limits this system does not enforce; empty if it enforces all."""
    weak = sorted({each for answer in answers for each in answer.weak})
    return f"not enforced by {platform.system()}'s kernel here: {', '.join(weak)}" if weak else ""
