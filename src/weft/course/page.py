"""Page of a lecture: every figure, table and claim with its command, its output and the verdict on its numbers."""

import base64
from collections.abc import Sequence

from weft.course.lectures import Lecture
from weft.course.workspace import EntryResult
from weft.errors import counted
from weft.figures.page import Section, page, part
from weft.figures.tables import Table
from weft.storage.files import read_bytes

MAX_OUTPUT_LINES = 40  # a longer output is folded; twice as many without a figure
MAX_FIGURE_BYTES = 20 << 20


def lecture_page(number: int, lecture: Lecture, results: Sequence[EntryResult]) -> str:
    """Return the page of a lecture."""
    sections = [_section(position, result) for position, result in enumerate(results, start=1)]
    return page(f"Lecture {number}: {lecture.title}", sections, summary=f"{lecture.about} {summary(results)}")


def summary(results: Sequence[EntryResult]) -> str:
    """Count the entries, and those whose numbers hold, differ or could not be computed, in a sentence."""
    checked = [result for result in results if result.verdicts]
    failed = sum(bool(result.error) for result in results)
    differing = sum(not result.holds for result in checked if not result.error)
    parts = [f"{counted(len(results), 'entry', 'entries')}, {len(checked)} of them checked"]
    parts += [f"{differing} differ" if differing else "all checks hold"] if checked else []
    parts += [f"{failed} failed"] if failed else []
    return "; ".join(parts) + "."


def verdict_table(result: EntryResult) -> Table:
    """Return the checks of an entry as a table."""
    rows = [(v.about, v.expected, v.found, "holds" if v.holds else "differs") for v in result.verdicts]
    return Table(("check", "expected", "found", ""), rows, text=(0, 1, 2, 3))


def _section(position: int, result: EntryResult) -> Section:
    images = [base64.b64encode(read_bytes(path, MAX_FIGURE_BYTES)).decode() for path in result.figures]
    lines = len(result.output.splitlines())
    folded = f"Output, {lines:,} lines" if lines > MAX_OUTPUT_LINES * (1 if images else 2) else ""
    output = result.output if lines > len(images) else ""  # the others name the figures
    html = part("entry", result, images, output=output, folded=folded, checks=verdict_table(result))
    return Section(f"{position}. {result.entry.title}", result.entry.about, html)
