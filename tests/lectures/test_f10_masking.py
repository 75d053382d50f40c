"""F10 (lecture 4): BERT masks 15 % of the words: 80 % [MASK], 10 % a random word, 10 % unchanged; special tokens never.

To see it: python -m pytest tests/lectures/test_f10_masking.py -s
"""

import numpy as np
import pytest

from weft.data.corrupt import MASKING, Masking, mask_words
from weft.data.sampler import streams

ROWS, LENGTH, VOCABULARY = 1984, 512, 30522  # [CLS] 252 tokens [SEP] 253 tokens, padded [SEP]: 10⁶ ordinary tokens
SPECIAL = np.array([0, 100, 101, 102, 103])  # bert-base-uncased's [PAD] [UNK] [CLS] [SEP] [MASK]
PAD, CLS, SEP, MASK = 0, 101, 102, 103


@pytest.mark.parametrize("whole_words", [False, True])
def test_frequencies_over_a_million_tokens(whole_words: bool) -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1000, VOCABULARY, (ROWS, LENGTH))
    tokens[:, 0], tokens[:, 253], tokens[:, -4], tokens[:, -3:] = CLS, SEP, SEP, PAD
    starts = draw.random((ROWS, LENGTH)) < 0.7
    masking = Masking(0.15, VOCABULARY, MASK, SPECIAL)
    inputs, chosen = mask_words(
        tokens, masking, streams(range(ROWS), 0, MASKING), starts=starts if whole_words else None
    )

    special = np.isin(tokens, SPECIAL)
    ordinary = int((~special).sum())
    assert ordinary >= 10**6 and not chosen[special].any()
    assert (inputs[~chosen] == tokens[~chosen]).all()
    assert not np.isin(inputs[chosen], [0, 100, 101, 102]).any()

    # all tokens of a word are treated alike, so that there are as many independent draws as words
    pieces = 1 / 0.7 if whole_words else 1.0
    masked, same = chosen & (inputs == MASK), chosen & (inputs == tokens)
    count = int(chosen.sum())
    for name, part, total, expected in (
        ("chosen", count, ordinary, 0.15),
        ("[MASK]", int(masked.sum()), count, 0.8),
        ("random", count - int((masked | same).sum()), count, 0.1),
        ("unchanged", int(same.sum()), count, 0.1),
    ):
        error = (expected * (1 - expected) / total * (2 * pieces - 1)) ** 0.5  # E[k²]/E[k] of geometric word lengths k
        print(f"{name:<10}{part / total:>9.4%}  expected {expected:.0%} ± {error:.3%}")
        assert abs(part / total - expected) < 3 * error
