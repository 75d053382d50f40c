"""What stands around the trainer for a goal: where its data comes from, how it is fed, how progress is measured.

A lesson knows one way to read data: running text, sentences in their documents, or rows with columns. `lesson_for`
finds the one that a recipe's goal needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.errors import RunError
from weft.models.base import LanguageModel
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.settle import Choice, TextFacts
from weft.runs.folder import RunFolder
from weft.runs.journal import Say
from weft.text.tokenizer import FILE, Tokenizer
from weft.training.evaluation import Evaluator, Writer
from weft.training.loader import Corpus, Feed


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of what is written, and of what is read where that has its own."""

    target: Tokenizer
    source: Tokenizer


@dataclass(frozen=True)
class Ending:
    """What a finished model is told to show: figures, and some texts."""

    figures: dict[str, Any] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Material:
    """Prepared data with all that is asked of a model that learns from it."""

    corpus: Feed | Corpus | Sequence[Corpus]
    evaluators: list[Evaluator]
    writer: Writer | None
    conclude: Callable[[LanguageModel], Ending]


def check_cut(folder: RunFolder, tokenizers: Tokenizers, noted: Mapping[str, Any]) -> None:
    """Refuse a tokenizer in the run's folder that is another one than the `noted` one, which made its tokens."""
    for key, own, place in (
        ("tokenizer", tokenizers.target, folder.path),
        ("source_tokenizer", tokenizers.source, folder.path / SOURCE_TOKENIZER),
    ):
        if noted.get(key, own.fingerprint) != own.fingerprint:
            file = (place if (place / FILE).is_file() else folder.path) / FILE
            raise RunError(f"{file}: not the tokenizer that this run's text was cut with; put that one back")


class Lesson(Protocol):
    """One way to read data."""

    def texts(self, recipe: Recipe, side: str = "target") -> Iterator[str]:
        """The training text, to measure it and to train a tokenizer; `side` is source or target."""
        ...

    def measure(self, recipe: Recipe) -> TextFacts:
        """How much there is to learn from."""
        ...

    def prepare(
        self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers, say: Say
    ) -> tuple[Recipe, list[Choice]]:
        """Write the data into the run's folder as tokens; the recipe with what only the data could tell."""
        ...

    def open(self, recipe: Recipe, folder: RunFolder, tokenizers: Tokenizers) -> Material:
        """What `prepare` wrote, ready to learn from."""
        ...


def lesson_for(recipe: Recipe) -> Lesson:
    """The lesson that the recipe's goal needs."""
    from weft.objectives.rows import RowLesson
    from weft.objectives.sentences import SentenceLesson
    from weft.objectives.text import TextLesson

    lessons: dict[str, type[Lesson]] = {"text": TextLesson, "sentences": SentenceLesson, "rows": RowLesson}
    return lessons[recipe.objective.reads]()
