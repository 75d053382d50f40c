"""Character frequencies, the model that every other has to beat."""

import math

import pytest

from weft.evaluate.baseline import CHARACTERS, fit, measure


def test_frequencies_with_one_added() -> None:
    model = fit(["aab"])
    # 3 characters, 2 kinds, and one count for all the unseen: 6
    assert model.bits("a") == pytest.approx(math.log2(6 / 3))
    assert model.bits("b") == pytest.approx(math.log2(6 / 2))
    assert model.bits("z") == pytest.approx(math.log2(6 * (CHARACTERS - 2)))


def test_all_characters_together_have_probability_one() -> None:
    model = fit(["some text", "and more of it: é😀"])
    seen = sum(2 ** -model.bits(character) for character in model.counts)
    unseen = (CHARACTERS - len(model.counts)) * 2 ** -model.bits("\u0001")
    assert seen + unseen == pytest.approx(1.0)


def test_bits_are_counted_per_utf8_byte() -> None:
    model = fit(["aaé"])
    measured = measure(model, ["é", "a"])
    assert (measured.characters, measured.bytes) == (2, 3)
    assert measured.bits_per_byte == pytest.approx((model.bits("é") + model.bits("a")) / 3)
    assert math.isnan(measure(model, []).bits_per_byte)


def test_english_costs_about_four_and_a_half_bits() -> None:
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 50
    assert 3.0 < measure(fit([text]), [text]).bits_per_byte < 4.6
