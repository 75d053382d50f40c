"""Tasks that need no download: rows to learn from and rows held out, drawn from small grammars.

    for row in tasks.rows("dates", "train"): …        {"source": "3 May 1999", "target": "1999-05-03"}

The same name gives the same rows everywhere and always. What is held out is so by construction: a hash of the item (the
day, the number, the sentence) puts it on one side, whatever else is drawn. A data source names a task as
`builtin:dates`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from weft.text.grammars import chatter, dates, letters, numbers, questions, sentiment
from weft.text.grammars.rng import Mine, Rng, Row, in_validation

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Task:
    """A task: the grammar that draws a row, and how many rows each side has."""

    draw: Callable[[Rng, Mine], Row | None]
    train: int = 20_000
    validation: int = 1_000


TASKS = {
    "copy": Task(letters.copy),
    "reverse": Task(letters.reverse),
    "dates": Task(dates.to_iso),
    "dates-back": Task(dates.to_words),
    "numbers": Task(numbers.to_digits),
    "numbers-back": Task(numbers.to_words),
    "sentiment": Task(sentiment.opinion),
    "questions": Task(questions.question),
    "chatter": Task(chatter.conversation, train=10_000, validation=500),
}
SOURCES = {f"builtin:{name}" for name in TASKS}  # as a data source names them


def rows(name: str, split: Split) -> Iterator[Row]:
    """The rows of a side, all different."""
    task, held_out = TASKS[name], split == "validation"
    rng = Rng(f"weft {name} {split}")
    seen: set[str] = set()
    while len(seen) < (task.validation if held_out else task.train):
        row = task.draw(rng, lambda key: in_validation(name, key) == held_out)
        if row is not None and (written := json.dumps(row)) not in seen:
            seen.add(written)
            yield row
