"""F17 (lecture 3): GPT-3's training mix, epochs = weight × 300 B ÷ tokens, compared with the slide.

To see it: python -m pytest tests/lectures/test_f17_mixture.py -s

The slide's weights (Brown et al. 2020, Table 2.2) are whole percents and sum to 101 %. Their rounding explains the
differences from the slide's epochs, except for WebText2: 22 % of 300 B are 3.5 epochs of 19 B tokens, and the slide's
2.9 would be 18 %. The paper gives no reason.
"""

import pytest

from weft.data.sampler import Mixture, Windows

NAMES = ["Common Crawl (filtered)", "WebText2", "Books1", "Books2", "Wikipedia"]
TOKENS = [410e9, 19e9, 12e9, 55e9, 3e9]
WEIGHTS = [0.60, 0.22, 0.08, 0.08, 0.03]
SLIDE = [0.44, 2.9, 1.9, 0.43, 3.4]
TOTAL = 300e9
LENGTH = 2048


def test_epochs_are_near_the_slides() -> None:
    mixture = Mixture(tuple(Windows(round(tokens), LENGTH) for tokens in TOKENS), tuple(WEIGHTS))
    epochs = mixture.epochs(round(sum(WEIGHTS) * TOTAL / LENGTH))  # the weights are fractions of 300 B
    for name, tokens, weight, ours, slide in zip(NAMES, TOKENS, WEIGHTS, epochs, SLIDE, strict=True):
        print(f"{name:<24}{tokens:>18,.0f}{weight:>8.1%}{ours:>7.2f} slide: {slide}")
    assert epochs == pytest.approx([0.439, 3.474, 2.0, 0.436, 3.0], abs=5e-4)
    half_percent = [0.005 * TOTAL / tokens for tokens in TOKENS]
    rows = zip(NAMES, epochs, SLIDE, half_percent, strict=True)
    differing = [name for name, ours, slide, rounding in rows if abs(ours - slide) > rounding + 0.05]
    assert differing == ["WebText2"] and sum(WEIGHTS) == pytest.approx(1.01)
