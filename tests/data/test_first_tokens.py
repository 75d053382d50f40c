"""The first tokens of a text: what data.tokens trains on."""

import numpy as np
import pytest

from weft.data.shards import Tokens


def text() -> Tokens:
    """Two shards of 10 and 6 tokens; sections begin at 0, 4 and at 0, 5; a token is 3 bytes."""
    tables = [np.array([[0, 4], [12, 18], [0, 1]]), np.array([[0, 5], [15, 3], [2, 3]])]
    return Tokens([np.arange(10), np.arange(10, 16)], tables)


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 10, 12, 15, 16, 99])
def test_the_first_tokens_and_their_bytes(tokens: int) -> None:
    whole, first = text(), text().first(tokens)
    kept = min(tokens, 16)
    assert len(first) == kept
    assert first.read(0, kept).tolist() == list(range(kept))
    assert first.documents(0, kept).tolist() == whole.documents(0, kept).tolist()
    assert first.bytes == 3 * kept
