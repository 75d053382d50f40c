"""Answer to a check: how many cases pass, and otherwise what is wrong and where, as text and as HTML."""

from typing import Any, NamedTuple

from markupsafe import Markup
from torch import Tensor

from weft.errors import counted
from weft.figures.tables import Table, text_table

MAX_ROWS, MAX_COLUMNS = 6, 6  # of a matrix that is shown
MAX_VALUE_CHARACTERS = 200


class Explanation(NamedTuple):
    """Answer to a check. `tensor` is the first that differs, `mistake` what commonly causes exactly these numbers."""

    name: str
    title: str
    passed: int = 0
    cases: int = 0
    problem: str = ""
    tensor: str = ""
    formula: str = ""
    source: str = ""
    line: int = 0
    text: str = ""
    mistake: str = ""
    expected: Any = None
    given: Any = None
    arguments: dict[str, Any] = {}  # noqa: RUF012
    failed: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    printed: str = ""

    @property
    def holds(self) -> bool:
        return not self.problem and self.passed == self.cases

    @property
    def headline(self) -> str:
        if self.holds:
            return f"{self.name}: right, in all {counted(self.cases, 'case')}"
        return f"{self.name}: {self.passed} of {counted(self.cases, 'case')} right"

    @property
    def sentences(self) -> list[str]:
        """Explanation, one sentence per line."""
        lines = [self.problem]
        if self.line:
            lines.append(f"line {self.line}: {self.text}")
        if self.mistake:
            lines.append(f"These are exactly the numbers of a known mistake: {self.mistake}.")
        if self.formula:
            lines.append(f"{self.formula}    ({self.source})")
        if self.arguments:
            lines.append(f"arguments: {', '.join(f'{name} {_size(value)}' for name, value in self.arguments.items())}")
        if self.failed:
            lines.append(f"wrong: {', '.join(self.failed)}")
        return [line for line in lines if line]

    def summary(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON data."""
        left_out = ("arguments", "expected", "given", "weak", "printed")
        return {"right": self.holds, **{key: value for key, value in self._asdict().items() if key not in left_out}}

    def tables(self) -> list[Table]:
        """Return expected and given values side by side."""
        if self.given is None or self.expected is None:
            return []
        rows = zip(*map(_lines, _most_different(self.expected, self.given)), strict=False)
        return [Table((f"{self.tensor}: expected", "given"), list(rows), text=(0, 1))]

    def __str__(self) -> str:
        tables = [text_table(table) for table in self.tables()]
        printed = [f"printed:\n{self.printed.rstrip()}"] if self.printed and not self.holds else []
        return "\n".join([self.headline, *self.sentences, *(f"\n{part}" for part in (*tables, *printed))])

    def _repr_html_(self) -> str:
        colour = "#1a7f37" if self.holds else "#b42318"
        html = Markup('<p style="color:{};font-weight:600">{}</p>').format(colour, self.headline)
        for sentence in self.sentences:
            html += Markup("<p><code>{}</code></p>" if sentence.startswith("line ") else "<p>{}</p>").format(sentence)
        for table in self.tables():
            head = Markup("").join(Markup("<th>{}</th>").format(cell) for cell in table.header)
            cell = Markup('<td style="text-align:left;white-space:pre;font-family:monospace">{}</td>')
            rows = Markup("").join(
                Markup("<tr>{}</tr>").format(Markup("").join(cell.format(each) for each in row)) for row in table.rows
            )
            html += Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, rows)
        return str(html)


def _size(value: Any) -> str:
    """Return a tensor's shape, a number, or the length of anything else."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"= {value}" if isinstance(value, bool | int | float) else f"of length {len(value)}"


def _most_different(expected: Any, given: Any) -> tuple[Any, Any]:
    """Return the matrices of two tensors that differ most."""
    if not (isinstance(expected, Tensor) and isinstance(given, Tensor) and expected.shape == given.shape):
        return expected, given
    if expected.dim() < 3 or not expected.numel():
        return expected, given
    one, other = expected.double().flatten(0, -3), given.double().flatten(0, -3)
    distance = (one - other).abs().nan_to_num(1.0, 1.0, 1.0).flatten(1).amax(1)
    return one[distance.argmax()], other[distance.argmax()]


def _lines(value: Any) -> list[str]:
    """Format a small part of a value, one row of a matrix per line."""
    if not isinstance(value, Tensor):
        text = f"{value:.6g}" if isinstance(value, float) else repr(value)
        return [text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"]
    while value.dim() > 2:
        value = value[0]
    matrix = value.reshape(1, -1) if value.dim() < 2 else value
    rows = [" ".join(f"{number:9.4g}" for number in row[:MAX_COLUMNS].tolist()) for row in matrix[:MAX_ROWS]]
    ends = ["" if matrix.shape[1] <= MAX_COLUMNS else " …"] * len(rows)
    return [row + end for row, end in zip(rows, ends, strict=True)] or ["(empty)"]
