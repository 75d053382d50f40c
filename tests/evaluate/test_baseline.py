"""Character frequencies, the baseline of every language model."""

import math

import pytest

from weft.evaluate.baseline import CHARACTERS, character_baseline


def bits(training: str, character: str) -> float:
    return character_baseline([training], [character]).bits


@pytest.mark.parametrize(("character", "ratio"), [("a", 6 / 3), ("b", 6 / 2), ("z", 6 * (CHARACTERS - 2))])
def test_frequencies_with_one_added(character: str, ratio: float) -> None:
    """3 characters, 2 distinct ones, and one count for all unseen ones: 6."""
    assert bits("aab", character) == pytest.approx(math.log2(ratio))


def test_all_characters_together_have_probability_one() -> None:
    text = "some text and more of it: é😀"
    seen = sum(2 ** -bits(text, character) for character in set(text))
    unseen = (CHARACTERS - len(set(text))) * 2 ** -bits(text, "\u0001")
    assert seen + unseen == pytest.approx(1.0)


def test_bits_are_counted_per_utf8_byte() -> None:
    found = character_baseline(["aa", "é"], ["é", "a"])
    assert (found.characters, found.bytes) == (2, 3)
    assert found.bits_per_byte == pytest.approx((bits("aaé", "é") + bits("aaé", "a")) / 3)
    assert math.isnan(character_baseline(["aaé"], []).bits_per_byte)
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 50
    assert 3.0 < character_baseline([text], [text]).bits_per_byte < 4.6
