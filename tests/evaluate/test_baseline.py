"""Character frequencies, the model that every other has to beat."""

import math

import pytest

from weft.evaluate.baseline import CHARACTERS, bits_per_byte, fit


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
    assert bits_per_byte(model, ["é", "a"]) == pytest.approx((model.bits("é") + model.bits("a")) / 3)
    assert math.isnan(bits_per_byte(model, []))


def test_english_costs_about_four_and_a_half_bits() -> None:
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 50
    assert 3.0 < bits_per_byte(fit([text]), [text]) < 4.6
