"""SQuAD's exact match and F1, on answers that its rules treat in their own way."""

import pytest

from weft.errors import DataError
from weft.evaluate.answers import answered, exact_match, f1, normalised


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.", "us"),
        ("A", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "right", "exact", "overlap"),
    [
        ("the cat", "Cat.", 1.0, 1.0),
        ("a black cat", "cat", 0.0, 2 / 3),  # precision 1/2, recall 1
        ("cat cat", "cat", 0.0, 2 / 3),  # a word counts as often as it stands in both
        ("dog", "cat", 0.0, 0.0),
        ("", "cat", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
    ],
)
def test_one_answer(answer: str, right: str, exact: float, overlap: float) -> None:
    assert exact_match(answer, right) == exact
    assert f1(answer, right) == pytest.approx(overlap)


def test_the_best_of_several_right_answers_counts() -> None:
    found = answered(["in Paris", "1999", "", "something"], [["Paris", "in Paris"], "in 1999", [], []])
    assert found.exact == pytest.approx(2 / 4)
    assert found.f1 == pytest.approx((1 + 2 / 3 + 1 + 0) / 4)
    assert found.count == 4
    assert found.metrics() == {"exact": found.exact, "f1": found.f1}


def test_mistakes_are_one_line() -> None:
    with pytest.raises(DataError, match="1 answers to 2 questions"):
        answered(["a"], ["a", "b"])
    with pytest.raises(DataError, match="no answers"):
        answered([], [])
