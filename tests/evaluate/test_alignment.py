"""Alignment error rate of attention, and the links it is measured against."""

import numpy as np
import pytest

from weft.errors import DataError
from weft.evaluate.alignment import Link, alignment_metrics, attended_words, parse_links, word_numbers
from weft.text.tokenizer import TokenSpan


def test_links_are_sure_or_possible() -> None:
    assert parse_links("0-1 1p0", "a b", "c d") == [Link(0, 1), Link(1, 0, sure=0)]
    assert parse_links("", "a", "b") == []


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        ("0:1", "alignment '0:1': expected links such as 0-0, or 0p1"),
        ("0-", "alignment '0-': expected links"),
        ("2-0", "alignment '2-0': the source has 2 words, counted from 0"),
        ("0-0 1p1", "alignment '1p1': the target has 1 word, counted from 0"),
    ],
)
def test_wrong_links_are_refused(alignment: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_links(alignment, "the man", "homme")


def test_tokens_belong_to_words_and_their_attention_is_added_up() -> None:
    text = " l'homme  dort"
    spans = [TokenSpan(0, "", text[a:b], a, b) for a, b in ((0, 2), (2, 3), (3, 8), (8, 10), (10, 14))]
    assert word_numbers(text, spans) == [0, 0, 0, 0, 1]  # spaces belong to the word before them
    assert word_numbers(text, []) == []
    attention = np.array([[0.4, 0.3, 0.3], [0.4, 0.2, 0.4], [0.9, 0.1, 0.0]], dtype=np.float32)
    assert attended_words(attention, [0, 1, 1], [0, 0, 2]) == {(1, 0), (0, 2)}
    assert attended_words(attention[:0], [0, 1, 1], []) == set()


def test_the_error_rate_is_och_and_neys() -> None:
    links = [Link(0, 0), Link(1, 2), Link(2, 1, sure=0)]
    assert alignment_metrics([({(0, 0), (1, 2)}, links)])["alignment_error"] == 0.0
    assert alignment_metrics([({(0, 0), (1, 2), (2, 1)}, links)])["alignment_error"] == 0.0  # possible links are free
    # one of two predictions is sure, the other is wrong: 1 − (1 + 1) ÷ (2 + 2)
    assert alignment_metrics([({(0, 0), (0, 1)}, links)])["alignment_error"] == pytest.approx(0.5)
    found = alignment_metrics([({(0, 0)}, links[:1]), ({(1, 0)}, links[:1])])
    assert found["alignment_error"] == pytest.approx(0.5)
    assert found["intervals"]["alignment_error"] == [0.0, 1.0]
    assert alignment_metrics([(set(), [])])["alignment_error"] == 0.0
