"""Tasks that need no download: rows to learn from and rows held out, drawn from small grammars.

    for row in tasks.rows("dates", "train"): …        {"source": "3 May 1999", "target": "1999-05-03"}

The same name gives the same rows everywhere and always. What is held out is so by construction: a hash of the item (the
day, the number, the sentence) puts it on one side, whatever else is drawn. A data source names a task as
`builtin:dates`.
"""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Literal, NamedTuple

from weft.text.grammars import rewriting, sentences
from weft.text.grammars.rng import Mine, Rng, Row

Split = Literal["train", "validation"]


class Task(NamedTuple):
    """A task: the grammar that draws a row, and how many rows each side has."""

    draw: Callable[[Rng, Mine], Row | None]
    train: int = 20_000
    validation: int = 1_000


TASKS = {
    "copy": Task(rewriting.copy),
    "reverse": Task(rewriting.reverse),
    "dates": Task(rewriting.words_to_date),
    "dates-back": Task(rewriting.date_to_words),
    "numbers": Task(rewriting.words_to_number),
    "numbers-back": Task(rewriting.number_to_words),
    "sentiment": Task(sentences.opinion),
    "questions": Task(sentences.question),
    "chatter": Task(sentences.conversation, train=10_000, validation=500),
}
SOURCES = {f"builtin:{name}" for name in TASKS}  # as a data source names them


def rows(name: str, split: Split) -> Iterator[Row]:
    """The rows of a side, all different."""
    task, held_out = TASKS[name], split == "validation"
    rng = Rng(f"weft {name} {split}")
    seen: set[str] = set()

    def mine(key: str) -> bool:
        """One item in ten is held out, and which ones never changes."""
        digest = sha256(f"{name}\0{key}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") % 10 == 0) == held_out

    while len(seen) < (task.validation if held_out else task.train):
        row = task.draw(rng, mine)
        if row is not None and (written := json.dumps(row)) not in seen:
            seen.add(written)
            yield row
