"""The model on one page: every part in the order of computation, with shapes, counts and the lines that compute it."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from weft.explain.anatomy.diagram import diagram, figure
from weft.explain.anatomy.parts import Part
from weft.explain.anatomy.recurrent import bahdanau_columns, ngram_columns, recurrent_columns
from weft.explain.anatomy.transformer import transformer_columns
from weft.explain.texts import TEXTS
from weft.figures.page import mounted, part
from weft.figures.picture import Picture
from weft.figures.tables import WIDTH
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Model
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.nn.init import empty_weights


@dataclass(frozen=True)
class Anatomy(Picture):
    """A model's parts; one column a stack, from what is read to what is written."""

    kind: str
    columns: tuple[Part, ...]
    context: int | None

    scripts = ("anatomy.js",)
    title = "The model on one page"
    about = TEXTS["anatomy"]

    @property
    def parameters(self) -> int:
        return sum(column.parameters for column in self.columns)

    def figure(self) -> Figure:
        return figure(diagram(self.columns))

    def html(self) -> str:
        return mounted("anatomy.js", self.data(), part("texts", [self.text()]))

    def data(self) -> dict[str, Any]:
        """What web/anatomy.js draws: all parts, and a diagram of each column; of several also one of all."""
        columns = [_record(each) for each in self.columns]
        each = [diagram((column,), number) for number, column in enumerate(self.columns)]
        drawn = [each[0]] if len(each) == 1 else [diagram(self.columns), *each]
        diagrams = [{**one._asdict(), "shapes": [shape._asdict() for shape in one.shapes]} for one in drawn]
        told = {"kind": self.kind, "parameters": self.parameters, "letters": self.letters()}
        return {**told, "columns": columns, "diagrams": diagrams}

    def letters(self) -> str:
        """What the letters in shapes mean."""
        length = f", at most {self.context:,}" if self.context else ""
        source = "; S: tokens of the source" if len(self.columns) > 1 else ""
        return f"B: texts in a batch; T: tokens of a text{length}{source}"

    def text(self) -> str:
        total = f"{self.parameters:,} parameters" if self.parameters else "counts, no parameters"
        lines = [f"{self.kind}, {total}", self.letters()]
        for column in self.columns:
            lines += ["", *_tree(column, "", "")]
        return "\n".join(lines)


COLUMNS: dict[type[LanguageModel], Callable[[Any], tuple[Part, ...]]] = {
    Transformer: transformer_columns,
    Recurrent: recurrent_columns,
    Bahdanau: bahdanau_columns,
    NGram: ngram_columns,
}


def anatomy(settings: Model) -> Anatomy:
    """A model taken apart, from its settings alone: it is built without memory, however large it is."""
    with empty_weights():
        model = build(settings)
    return Anatomy(settings.kind, COLUMNS[type(model)](model), getattr(settings, "longest", None))


def _record(part: Part) -> dict[str, Any]:
    """A part and what is in it, as a page shows them."""
    shown = ("name", "formula", "shape", "parameters", "settings", "repeats", "note")
    return {
        **{key: getattr(part, key) for key in shown},
        "code": [asdict(each) for each in part.code],
        "parts": [_record(inside) for inside in part.parts],
    }


def _tree(part: Part, before: str, below: str) -> Iterator[str]:
    """A part and what is in it, a line each; below a part without parts its formula, and where it is computed."""
    times = f"{part.repeats} × " if part.repeats > 1 else ""
    count = f"{times}{part.parameters:,}" if part.parameters else ""
    first, *more = _fitted(f"{before}{times}{part.name}", "" if part.parts else part.shape, count)
    yield first
    yield from (f"{below}  {line}" for line in more)
    if part.formula and not part.parts:
        lines = textwrap.wrap(part.formula, WIDTH - len(below) - 2, break_long_words=False)
        place = f"  {part.code[0].place}" if part.code else ""
        space = WIDTH - len(below) - 2 - len(lines[-1])
        if len(place) <= space:
            lines[-1] += place.rjust(space)
        yield from (f"{below}  {line}" for line in lines)
    for number, inside in enumerate(part.parts, 1):
        last = number == len(part.parts)
        yield from _tree(inside, below + ("└ " if last else "├ "), below + ("  " if last else "│ "))


def _fitted(name: str, shape: str, count: str) -> list[str]:
    """Name, shape and count on a line; the shape on a line of its own where it is too long."""
    space = WIDTH - len(name) - len(count)
    if len(shape) + 4 > space:
        return [f"{name}{count.rjust(WIDTH - len(name))}".rstrip(), shape]
    start = max(len(name) + 2, 34)
    start = start if start + len(shape) + 2 + len(count) <= WIDTH else len(name) + 2
    return [f"{name.ljust(start)}{shape}{count.rjust(WIDTH - start - len(shape))}".rstrip()]
