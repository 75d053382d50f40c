"""Answer to a check: how many cases pass, and otherwise what is wrong and where, as text and as HTML."""

from typing import Any, NamedTuple

from torch import Tensor

from weft.errors import counted
from weft.figures.page import part
from weft.figures.tables import Table, text_table

MAX_ROWS, MAX_COLUMNS = 6, 6  # of a matrix that is shown
MAX_VALUE_CHARACTERS, MAX_ARGUMENT_CHARACTERS = 200, 40


class Explanation(NamedTuple):
    """Answer to a check. `tensor` is the first that differs, `mistake` what commonly causes exactly these numbers."""

    name: str
    title: str
    passed: int = 0
    cases: int = 0  # none if it was not checked
    problem: str = ""
    tensor: str = ""
    formula: str = ""
    source: str = ""
    line: int = 0
    text: str = ""
    mistake: str = ""
    repair: str = ""
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
        right = f"{self.passed} of {counted(self.cases, 'case')} right" if self.cases else "not checked"
        return f"{self.name}: " + (f"right, in all {counted(self.cases, 'case')}" if self.holds else right)

    @property
    def sentences(self) -> list[str]:
        """Explanation, one sentence per line."""
        arguments = ", ".join(f"{name} {_size(value)}" for name, value in self.arguments.items())
        lines = {
            self.problem: self.problem,
            f"line {self.line}: {self.text}": self.line,
            self.repair: self.repair,
            f"These are exactly the numbers of a known mistake: {self.mistake}.": self.mistake,
            f"{self.formula}    ({self.source})": self.formula,
            f"arguments: {arguments}": arguments,
            f"wrong: {', '.join(self.failed)}": self.failed,
        }
        return [line for line, wanted in lines.items() if wanted]

    def summary(self) -> dict[str, Any]:
        """Return everything but the tensors, as JSON data."""
        left_out = {"arguments", "expected", "given", "weak", "printed"}
        return {"right": self.holds, **{key: getattr(self, key) for key in self._fields if key not in left_out}}

    @property
    def table(self) -> str:
        """Expected and given values side by side; empty if there are none."""
        if self.given is None or self.expected is None:
            return ""
        rows = zip(*map(_lines, _most_different(self.expected, self.given)), strict=False)
        return text_table(Table((f"{self.tensor}: expected", "given"), list(rows), text=(0, 1)))

    def __repr__(self) -> str:  # what `weft.check` shows at a prompt
        printed = f"printed:\n{self.printed.rstrip()}" if self.printed and not self.holds else ""
        return "\n".join([self.headline, *self.sentences, *(f"\n{part}" for part in (self.table, printed) if part)])

    def _repr_html_(self) -> str:
        return str(part("answer", self))


def _size(value: Any) -> str:
    """Return a tensor's shape, a short value, or the length of a long one."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"= {value!r}" if len(repr(value)) <= MAX_ARGUMENT_CHARACTERS else f"of length {len(value)}"


def _most_different(expected: Any, given: Any) -> tuple[Any, Any]:
    """Return the matrices of two tensors that differ most."""
    shapes = [value.shape if isinstance(value, Tensor) else None for value in (expected, given)]
    if shapes[0] is None or shapes[0] != shapes[1] or len(shapes[0]) < 3 or not expected.numel():
        return expected, given
    one, other = expected.double().flatten(0, -3), given.double().flatten(0, -3)
    worst = (one - other).abs().nan_to_num(1.0, 1.0, 1.0).flatten(1).amax(1).argmax()
    return one[worst], other[worst]


def _lines(value: Any) -> list[str]:
    """Format a small part of a value, one row of a matrix per line."""
    if not isinstance(value, Tensor):
        text = f"{value:.6g}" if isinstance(value, float) else repr(value)
        return [text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"]
    if not value.numel():
        return [f"(empty: {tuple(value.shape)})"]
    matrix = value.reshape(-1, value.shape[-1] if value.dim() > 1 else value.numel())
    end = " …" if matrix.shape[1] > MAX_COLUMNS else ""
    return [" ".join(f"{number:9.4g}" for number in row[:MAX_COLUMNS].tolist()) + end for row in matrix[:MAX_ROWS]]
