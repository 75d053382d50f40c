"""Analogies: a is to b as c is to which word (Mikolov et al. 2013)?"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.streams import lines
from weft.errors import DataError

BATCH = 256  # questions compared with the whole vocabulary in one product


class Question(NamedTuple):
    """Analogy: a is to b as c is to d."""

    section: str
    words: tuple[str, str, str, str]


class SectionAccuracy(NamedTuple):
    """Number of right answers among the answered questions of a section, and of questions with an unknown word."""

    section: str
    correct: int
    answered: int
    left_out: int

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.answered if self.answered else None


def read_questions(name: str) -> list[Question]:
    """Read a file in the format of questions-words.txt: `: section` lines, and four words on every other line."""
    section, questions = "all", []
    for number, line in enumerate(lines(name), 1):
        words = line.split()
        if line.startswith(":"):
            section = line[1:].strip() or section
        elif len(words) == 4:
            questions.append(Question(section, (words[0], words[1], words[2], words[3])))
        elif words:
            expected = "four words, such as 'Athens Greece Oslo Norway', or ': section'"
            raise DataError(f"{name}: line {number}: expected {expected}")
    if not questions:
        raise DataError(f"{name}: has no questions; expected lines of four words, and ': section' between them")
    return questions


@torch.no_grad()
def analogies(
    questions: Sequence[Question], table: Tensor, id_of: Callable[[str], int | None], *, excluded: Sequence[int] = ()
) -> list[SectionAccuracy]:
    """Return the accuracy by section, and in total.

    The answer is the word other than a, b and c that is nearest to b − a + c, sums of vectors of length 1 (3CosAdd).
    `table` is (vocab_size, d); `id_of` returns None for an unknown word. Questions with one are left out, which
    flatters a small vocabulary. Rows of `excluded` are never an answer.
    """
    unit = F.normalize(table.float(), dim=-1)
    ids = {word: id_of(word) for word in dict.fromkeys(word for question in questions for word in question.words)}
    known = [(question.section, [ids[word] for word in question.words]) for question in questions]
    asked = [(section, row) for section, row in known if None not in row]
    right: list[bool] = []
    for start in range(0, len(asked), BATCH):
        rows = torch.tensor([row for _, row in asked[start : start + BATCH]])
        a, b, c, d = rows.T
        scores = F.normalize(unit[b] - unit[a] + unit[c], dim=-1) @ unit.T
        scores[:, list(excluded)] = -torch.inf
        scores.scatter_(1, rows[:, :3], -torch.inf)
        right += (scores.argmax(dim=1) == d).tolist()
    sections = dict.fromkeys(question.section for question in questions)
    results = []
    for section in sections:
        answers = [good for (name, _), good in zip(asked, right, strict=True) if name == section]
        total = sum(question.section == section for question in questions)
        results.append(SectionAccuracy(section, sum(answers), len(answers), total - len(answers)))
    if not asked:
        raise DataError(f"none of the {len(questions)} questions has all four words in the vocabulary")
    correct, answered = sum(each.correct for each in results), len(asked)
    return [*results, SectionAccuracy("total", correct, answered, len(questions) - answered)]
