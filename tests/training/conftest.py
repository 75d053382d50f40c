"""A model, a text and a recipe small enough to train in a second."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.data import held
from weft.objectives.losses import next_token

from weft.models.base import LanguageModel
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.recipe.settle import TextFacts, settle
from weft.training.loader import feed

VOCAB = 23


class FileTokenizer:
    """Stands in for a tokenizer: the loop only asks how many tokens there are, and to save it."""

    vocab_size = VOCAB

    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


@pytest.fixture
def tokenizer() -> FileTokenizer:
    return FileTokenizer()


@pytest.fixture
def corpus() -> SimpleNamespace:
    """A text with something to learn: each token is likely to be followed by the next number."""
    generator = np.random.default_rng(0)
    jumps = np.where(generator.random(4000) < 0.8, 1, generator.integers(0, VOCAB, 4000))
    ids = np.cumsum(jumps) % VOCAB
    starts = list(range(0, 4000, 500))
    return SimpleNamespace(
        train=held.tokens(ids[:3500], starts[:7], [600] * 7),
        validation=held.tokens(ids[3500:], [0], [600]),
    )


def small(*changes: str) -> Recipe:
    """A settled recipe of a two-layer LLaMA with dropout, so that random numbers matter too."""
    base = [
        "model.layers=2",
        "model.d_model=16",
        "model.attention.heads=2",
        "model.feedforward.d_ff=24",
        "model.dropout=0.1",
        f"model.vocab_size={VOCAB}",
        "tokenizer=byte",
        "batch.size=4",
        "batch.length=12",
        "steps=12",
        "log.every=3",
        "evaluate.every=4",
        "checkpoint.every=5",
    ]
    return settle(resolve("llama-tiny", [*base, *changes]), TextFacts(3500))[0]


@pytest.fixture
def recipe() -> Callable[..., Recipe]:
    return small


@pytest.fixture
def evaluator(corpus: Any) -> Callable[[LanguageModel], dict[str, float]]:
    """The mean loss on the held-out part."""

    def evaluate(model: LanguageModel) -> dict[str, float]:
        settings = small()
        held_out = SimpleNamespace(train=corpus.validation)
        with torch.no_grad():
            loss, count, _ = next_token(settings.objective)(model, feed(settings, held_out).parts(1)[0])
        return {"loss": float(loss) / float(count)}

    return evaluate
