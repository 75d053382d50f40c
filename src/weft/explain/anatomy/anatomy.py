"""A model on one page: every part in the order of computation, with shapes, counts and the lines that compute it."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from weft.explain.anatomy.diagram import beside, diagram, figure, unrolled
from weft.explain.anatomy.parts import ModelPart
from weft.explain.anatomy.recurrent import (
    bahdanau_columns,
    bengio_columns,
    elmo_columns,
    ngram_columns,
    recurrent_columns,
    word_table_columns,
)
from weft.explain.anatomy.transformer import transformer_columns
from weft.explain.texts import TEXTS
from weft.figures.page import as_json
from weft.figures.picture import Picture
from weft.figures.tables import WIDTH
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.bengio import Bengio
from weft.models.build import build
from weft.models.config import Model
from weft.models.config import Recurrent as RecurrentConfig
from weft.models.elmo import ELMo
from weft.models.ngram import NGram
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable
from weft.nn.init import empty_weights

COLUMNS: dict[type[LanguageModel], Callable[[Any], tuple[ModelPart, ...]]] = {
    Transformer: transformer_columns,
    Bengio: bengio_columns,
    Recurrent: recurrent_columns,
    ELMo: elmo_columns,
    Bahdanau: bahdanau_columns,
    NGram: ngram_columns,
    WordTable: word_table_columns,
}


@dataclass(frozen=True)
class Anatomy(Picture):
    """Parts of a model; one column per stack, from the input to the output."""

    settings: Model
    columns: tuple[ModelPart, ...]

    module = "anatomy.js"
    title = "The model on one page"
    about = TEXTS["anatomy"]

    @property
    def parameters(self) -> int:
        return sum(column.parameters for column in self.columns)

    def figure(self) -> Figure:
        drawn = diagram(self.columns)
        return figure(beside(drawn, unrolled(self.columns[0])) if isinstance(self.settings, RecurrentConfig) else drawn)

    def data(self) -> dict[str, Any]:
        """Return the data of web/anatomy.js: all parts, a diagram of each column and, of several, one of all."""
        single = [diagram((column,), number) for number, column in enumerate(self.columns)]
        diagrams = single if len(single) == 1 else [diagram(self.columns), *single]
        columns = [self._record(column) for column in self.columns]
        named = {"kind": self.settings.kind, "parameters": self.parameters, "letters": self.letters()}
        over_time = {"unrolled": unrolled(self.columns[0])} if isinstance(self.settings, RecurrentConfig) else {}
        return as_json({**named, "columns": columns, "diagrams": diagrams, **over_time})

    def _record(self, part: ModelPart) -> dict[str, Any]:
        """Return a part and its parts as JSON data."""
        fields = {key: getattr(part, key) for key in ("name", "formula", "shape", "parameters", "repeats", "note")}
        fields |= {"settings": part.settings(self.settings), "code": part.code}
        return fields | {"parts": list(map(self._record, part.parts))}

    def letters(self) -> str:
        """Return the meaning of the letters in shapes."""
        longest = getattr(self.settings, "longest", None)
        length = f", at most {longest:,}" if longest else ""
        source = "; S: tokens of the source" if len(self.columns) > 1 and self.settings.kind != "elmo" else ""
        return f"B: texts in a batch; T: tokens of a text{length}{source}"

    def text(self) -> str:
        total = f"{self.parameters:,} parameters" if self.parameters else "counts, no parameters"
        lines = [f"{self.settings.kind}, {total}", self.letters()]
        for column in self.columns:
            lines += ["", *_tree(column, "", "")]
        return "\n".join(lines)


def anatomy(settings: Model) -> Anatomy:
    """Return the parts of a model from its settings alone: it is built without memory, whatever its size."""
    with empty_weights():
        model = build(settings)
    return Anatomy(settings, COLUMNS[type(model)](model))


def _tree(part: ModelPart, prefix: str, indent: str) -> Iterator[str]:
    """Yield a line per part; below a part without parts, its formula and the location of its code."""
    times = f"{part.repeats} × " if part.repeats > 1 else ""
    count = f"{times}{part.parameters:,}" if part.parameters else ""
    first, *more = _fitted(f"{prefix}{times}{part.name}", "" if part.parts else part.shape, count)
    yield first
    yield from (f"{indent}  {line}" for line in more)
    if part.formula and not part.parts:
        lines = textwrap.wrap(part.formula, WIDTH - len(indent) - 2, break_long_words=False)
        location = f"  {part.code[0].place}" if part.by else ""
        space = WIDTH - len(indent) - 2 - len(lines[-1])
        if len(location) <= space:
            lines[-1] += location.rjust(space)
        yield from (f"{indent}  {line}" for line in lines)
    for number, inside in enumerate(part.parts, 1):
        last = number == len(part.parts)
        yield from _tree(inside, indent + ("└ " if last else "├ "), indent + ("  " if last else "│ "))


def _fitted(name: str, shape: str, count: str) -> list[str]:
    """Return name, shape and count on one line, or the shape on a second line if it is too long."""
    space = WIDTH - len(name) - len(count)
    if len(shape) + 4 > space:
        return [f"{name}{count.rjust(WIDTH - len(name))}".rstrip(), shape]
    start = max(len(name) + 2, 34)
    start = start if start + len(shape) + 2 + len(count) <= WIDTH else len(name) + 2
    return [f"{name.ljust(start)}{shape}{count.rjust(WIDTH - start - len(shape))}".rstrip()]
