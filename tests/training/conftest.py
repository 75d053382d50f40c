"""The small runs and text of `small.py` as fixtures."""

from pathlib import Path

import pytest
from tests.training.small import Corpus, Evaluate, Runs, held_out_loss, small_text


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def corpus() -> Corpus:
    return small_text()


@pytest.fixture
def evaluate(corpus: Corpus) -> Evaluate:
    """The mean loss on the held-out part."""
    return held_out_loss(corpus)
