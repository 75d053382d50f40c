"""F11 (lecture 4): next-sentence pairs, half of them true successors and half from another document.

To see it: python -m pytest tests/lectures/test_f11_sentence_pairs.py -s
"""

import numpy as np

from weft.data.sampler import Array
from weft.data.sentences import Sentences, sentence_pairs

PAIRS = 4000


class Books:
    """Documents of 2 to 40 sentences; a token's id encodes its document and its position there."""

    def __init__(self) -> None:
        draw, self._document, self._sentences = np.random.default_rng(0), list[int](), list[Array]()
        for document in range(30):
            start = 10_000 * (document + 1)
            for length in draw.integers(3, 25, draw.integers(2, 40)):
                self._sentences.append(np.arange(start, start + length))
                self._document.append(document)
                start += int(length)

    def flat_ids(self, field: str) -> Array:
        return np.concatenate(self._sentences)

    def lengths(self, field: str) -> Array:
        return np.array([len(sentence) for sentence in self._sentences])

    def values(self, field: str) -> Array:
        return np.array(self._document)


def test_half_follow_and_half_come_from_another_document() -> None:
    sentences = Sentences(Books())  # type: ignore[arg-type]
    follow = 0
    for a, a_length, b, _, is_next in zip(*sentence_pairs(sentences, range(PAIRS), seed=1, length=128), strict=True):
        end_of_a, start_of_b = sentences.tokens[a + a_length - 1], sentences.tokens[b]
        same_document = end_of_a // 10_000 == start_of_b // 10_000
        assert is_next == (start_of_b == end_of_a + 1) == same_document
        follow += is_next
    error = (0.25 / PAIRS) ** 0.5
    print(f"{follow / PAIRS:.2%} of {PAIRS} pairs follow, expected 50 % ± {error:.2%}")
    assert abs(follow / PAIRS - 0.5) < 3 * error
