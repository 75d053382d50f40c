"""The small model, text and recipe of `small.py` as fixtures."""

import pytest
from tests.training.small import Corpus, Evaluate, MakeRecipe, held_out_loss, small, small_text


@pytest.fixture
def corpus() -> Corpus:
    return small_text()


@pytest.fixture
def recipe() -> MakeRecipe:
    return small


@pytest.fixture
def evaluate(corpus: Corpus) -> Evaluate:
    """The mean loss on the held-out part."""
    return held_out_loss(corpus)
