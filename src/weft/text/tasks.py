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

from weft.errors import DataError, suggestion
from weft.text.grammars import chatter, dates, letters, numbers, questions, sentiment
from weft.text.grammars.rng import Mine, Rng, Row, in_validation

Split = Literal["train", "validation"]
PATIENCE = 20_000  # draws in a row that bring nothing new: then there is nothing new


@dataclass(frozen=True)
class Task:
    """A task: the columns of its rows, the grammar that draws them, and how many a side has by default."""

    name: str
    columns: tuple[str, ...]
    draw: Callable[[Rng, Mine], Row | None]
    train: int = 20_000
    validation: int = 1_000


_PAIR = ("source", "target")
_TASKS = {
    task.name: task
    for task in (
        Task("copy", _PAIR, letters.copy),
        Task("reverse", _PAIR, letters.reverse),
        Task("dates", _PAIR, dates.to_iso),
        Task("dates-back", _PAIR, dates.to_words),
        Task("numbers", _PAIR, numbers.to_figures),
        Task("numbers-back", _PAIR, numbers.to_words),
        Task("sentiment", ("text", "label"), sentiment.opinion),
        Task("questions", ("context", "question", "answer", *_PAIR), questions.question),
        Task("chatter", ("messages",), chatter.conversation, train=10_000, validation=500),
    )
}


def names() -> list[str]:
    """The tasks there are."""
    return list(_TASKS)


def describe(name: str) -> Task:
    """A task by its name."""
    name = name.removeprefix("builtin:")
    if name not in _TASKS:
        raise DataError(f"builtin:{name}: no such built-in task; {suggestion(name, _TASKS)}")
    return _TASKS[name]


def rows(name: str, split: Split, count: int | None = None) -> Iterator[Row]:
    """The first `count` rows of a side, all different; fewer are the beginning of more."""
    task = describe(name)
    if split not in ("train", "validation"):
        raise DataError(f"builtin:{task.name}: no side '{split}'; {suggestion(split, ('train', 'validation'))}")
    wanted = (task.train if split == "train" else task.validation) if count is None else count
    if wanted < 0:
        raise DataError(f"builtin:{task.name}: {wanted} rows: expected 0 or more")
    return _drawn(task, split, wanted)


def _drawn(task: Task, split: Split, wanted: int) -> Iterator[Row]:
    held_out = split == "validation"
    rng = Rng(f"weft {task.name} {split}")
    seen: set[str] = set()
    idle = 0

    def mine(key: str) -> bool:
        return in_validation(task.name, key) == held_out

    while len(seen) < wanted:
        row = task.draw(rng, mine)
        written = "" if row is None else json.dumps(row)
        if row is None or written in seen:
            idle += 1
            if idle == PATIENCE:
                raise DataError(f"builtin:{task.name}: {wanted} rows are more than there are; it has {len(seen)}")
            continue
        idle = 0
        seen.add(written)
        yield row
