"""The small model, text and recipe of `small.py` as fixtures."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tests.training.small import Evaluate, held_out_loss, small, small_text

from weft.recipe.config import SettledRecipe


@pytest.fixture
def corpus() -> SimpleNamespace:
    return small_text()


@pytest.fixture
def recipe() -> Callable[..., SettledRecipe]:
    return small


@pytest.fixture
def evaluate(corpus: SimpleNamespace) -> Evaluate:
    """The mean loss on the held-out part."""
    return held_out_loss(corpus)
