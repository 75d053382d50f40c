"""Page of a lecture: every figure, table and claim with its command, its output and the verdict on its numbers."""

import base64
from collections.abc import Sequence

from markupsafe import Markup

from weft.course.lectures import Lecture
from weft.course.workspace import EntryResult
from weft.errors import counted
from weft.figures.page import Section, html_table, page, part
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
    entry = result.entry
    if entry.python:
        script = part("texts", [entry.python.strip()])
        html = part("fold", f"Python, {counted(len(entry.text.splitlines()), 'line')}", script)
    else:
        words = [[_word(word) for word in ("$", *line.split())] for line in entry.lines]
        html = Markup('<pre class="lecture-command">{}</pre>').format(Markup("\n").join(map(Markup(" ").join, words)))
    if result.error:
        html += Markup('<p class="lecture-failed">Failed: {}</p>').format(result.error)
    for path in result.figures:
        data = base64.b64encode(read_bytes(path, MAX_FIGURE_BYTES)).decode()
        image = Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">').format(data, f"Figure: {entry.title}")
        html += Markup('<div class="lecture-figure scroll" tabindex="0">{}</div>').format(image)
    if result.output and not (result.figures and len(result.output.splitlines()) <= len(result.figures)):
        output = Markup('<div class="lecture-output scroll" tabindex="0"><pre>{}</pre></div>').format(result.output)
        lines = len(result.output.splitlines())
        html += (
            part("fold", f"Output, {lines:,} lines", output)
            if lines > MAX_OUTPUT_LINES * (1 if result.figures else 2)
            else output
        )
    if result.verdicts:
        html += html_table(verdict_table(result), kind="checks")
    return Section(f"{position}. {entry.title}", entry.about, html)


def _word(word: str) -> Markup:
    """Return a word of a command that no line break divides, even at a hyphen."""
    return Markup("<span>{}</span>" if "-" in word else "{}").format(word)
