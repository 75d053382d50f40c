"""The small model, text and recipe of `small.py` as fixtures."""

from pathlib import Path

import pytest
from tests.training.small import Corpus, Evaluate, MakeRecipe, Runs, held_out_loss, small, small_text


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


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
